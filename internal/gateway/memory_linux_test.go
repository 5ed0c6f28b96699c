package gateway

import (
	"testing"
	"testing/fstest"
)

func TestFindCgroup(t *testing.T) {
	const (
		mounts1 = "30 20 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n36 30 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n37 30 0:32 ROOT /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
		mounts2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		none1   = "9223372036854771712\n"
	)
	root := func(s, r string) string {
		return s[:len(s)-len("ROOT /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n")] + r + " /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		held  int64
		limit int64 // 0 for none
	}{
		{"version 2", map[string]string{
			"proc/self/cgroup": "0::/pod/web\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/pod/web/memory.max": "1000\n", "sys/fs/cgroup/pod/web/memory.current": "700\n",
			"sys/fs/cgroup/pod/web/memory.stat": "anon 300\ninactive_file 150\nactive_file 50\nslab 7\n",
		}, 500, 1000},
		{"version 2, the limit is an ancestor's", map[string]string{
			"proc/self/cgroup": "0::/pod/web\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/pod/web/memory.max": "max\n", "sys/fs/cgroup/pod/web/memory.current": "700\n",
			"sys/fs/cgroup/pod/memory.max": "2000\n", "sys/fs/cgroup/pod/memory.current": "900\n",
		}, 900, 2000},
		{"version 2, the ancestor's is less", map[string]string{
			"proc/self/cgroup": "0::/pod/web\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/pod/web/memory.max": "3000\n", "sys/fs/cgroup/pod/web/memory.current": "700\n",
			"sys/fs/cgroup/pod/memory.max": "2000\n", "sys/fs/cgroup/pod/memory.current": "900\n",
		}, 900, 2000},
		{"version 2 in a container with a namespace", map[string]string{
			"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "700",
		}, 700, 1000},
		{"version 2 without a limit", map[string]string{
			"proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/pod/memory.max": "max\n", "sys/fs/cgroup/pod/memory.current": "700\n",
		}, 0, 0},
		{"version 1", map[string]string{
			"proc/self/cgroup": "5:cpu:/a\n4:memory:/pod/web\n0::/\n", "proc/self/mountinfo": root(mounts1, "/"),
			"sys/fs/cgroup/memory/pod/web/memory.limit_in_bytes": "1000\n", "sys/fs/cgroup/memory/pod/web/memory.usage_in_bytes": "700\n",
			"sys/fs/cgroup/memory/pod/web/memory.stat":   "cache 1\ninactive_file 600\ntotal_inactive_file 100\ntotal_active_file 100\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": none1,
		}, 500, 1000},
		{"version 1 in a container: a part is mounted", map[string]string{
			"proc/self/cgroup": "4:memory,hugetlb:/docker/abc\n", "proc/self/mountinfo": root(mounts1, "/docker/abc"),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "700\n",
		}, 700, 1000},
		{"version 1 without a limit", map[string]string{
			"proc/self/cgroup": "4:memory:/pod\n", "proc/self/mountinfo": root(mounts1, "/"),
			"sys/fs/cgroup/memory/pod/memory.limit_in_bytes": none1,
		}, 0, 0},
		{"not mounted", map[string]string{"proc/self/cgroup": "4:memory:/pod\n0::/\n", "proc/self/mountinfo": "1 2 3:4 / / rw - ext4 /dev/vda rw\n"}, 0, 0},
		{"no cgroups", nil, 0, 0},
		{"nonsense", map[string]string{"proc/self/cgroup": "x\n::\n4:memory\n", "proc/self/mountinfo": "-\n - \n1 2 3 4 5 - cgroup\n"}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fsys := fstest.MapFS{}
			for name, text := range tt.files {
				fsys[name] = &fstest.MapFile{Data: []byte(text)}
			}
			held, limit, ok := findCgroup(fsys, "self").read()
			if held != tt.held || limit != tt.limit || ok != (tt.limit > 0) {
				t.Errorf("held %d of %d, %v; want %d of %d", held, limit, ok, tt.held, tt.limit)
			}
		})
	}
}
