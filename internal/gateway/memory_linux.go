package gateway

import (
	"bufio"
	"bytes"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
)

// A cgroup is the control group that limits the process's memory most.
type cgroup struct {
	root  fs.FS
	dir   string
	files cgroupFiles
}

// cgroupFiles are the names of the two versions' files.
type cgroupFiles struct {
	limit, usage string
	cache        []string // keys of memory.stat, what the kernel takes back by itself
}

var (
	cgroup1 = cgroupFiles{"memory.limit_in_bytes", "memory.usage_in_bytes", []string{"total_inactive_file", "total_active_file"}}
	cgroup2 = cgroupFiles{"memory.max", "memory.current", []string{"inactive_file", "active_file"}}
)

// ownCgroup returns the cgroup of this process, or nil where none limits it.
func ownCgroup() *cgroup { return findCgroup(os.DirFS("/"), "self") }

// findCgroup looks in a root directory for the cgroup of process pid: a line of
// /proc/PID/cgroup has a path in a hierarchy, and /proc/PID/mountinfo where the
// hierarchy is mounted (cgroups(7), proc(5)). The limit is the least of those
// of the group and its ancestors, as far as they can be seen.
func findCgroup(root fs.FS, pid string) *cgroup {
	groups, err := fs.ReadFile(root, "proc/"+pid+"/cgroup")
	if err != nil {
		return nil
	}
	mounts, err := fs.ReadFile(root, "proc/"+pid+"/mountinfo")
	if err != nil {
		return nil
	}
	var best *cgroup
	least := int64(0)
	for line := range strings.Lines(string(groups)) { // ID:CONTROLLERS:PATH
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		files, kind := cgroup1, "memory"
		switch {
		case part[0] == "0" && part[1] == "":
			files, kind = cgroup2, ""
		case !hasWord(part[1], "memory"):
			continue
		}
		top, dir, ok := mountOf(mounts, kind, part[2])
		if !ok {
			continue
		}
		for {
			g := &cgroup{root, strings.TrimPrefix(dir, "/"), files}
			if limit, ok := g.number(files.limit); ok && (best == nil || limit < least) {
				best, least = g, limit
			}
			if dir == top || dir == "/" {
				break
			}
			dir = path.Dir(dir)
		}
	}
	return best
}

// mountOf returns where the hierarchy of a controller is mounted, "" for
// version 2, and where the group at path stands in it.
func mountOf(mountinfo []byte, controller, group string) (top, dir string, ok bool) {
	s := bufio.NewScanner(bytes.NewReader(mountinfo))
	for s.Scan() {
		before, after, ok := strings.Cut(s.Text(), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		if controller == "" && g[0] != "cgroup2" || controller != "" && (g[0] != "cgroup" || !hasWord(g[2], controller)) {
			continue
		}
		root, top := f[3], f[4]
		// In a container the mount may show a part of the hierarchy only.
		rest := group
		if root != "/" {
			if rest, ok = strings.CutPrefix(group, root); !ok {
				rest = ""
			}
		}
		return top, path.Join(top, rest), true
	}
	return "", "", false
}

func hasWord(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// number reads a file of one number. It is false for a limit that is none.
func (g *cgroup) number(name string) (int64, bool) {
	data, err := fs.ReadFile(g.root, path.Join(g.dir, name))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64) // "max" is no number
	const none = 1 << 62                                                // version 1 says the largest multiple of a page
	return n, err == nil && n > 0 && n < none
}

// sockets reports whether the group's account has what the kernel keeps for
// sockets: it does in version 2.
func (g *cgroup) sockets() bool { return g.files.limit == cgroup2.limit }

// read returns what the group holds, without the files it caches, and its
// limit. It is false where there is none, or no group.
func (g *cgroup) read() (held, limit int64, ok bool) {
	if g == nil {
		return 0, 0, false
	}
	limit, ok = g.number(g.files.limit)
	if !ok {
		return 0, 0, false
	}
	if held, ok = g.number(g.files.usage); !ok {
		return 0, 0, false
	}
	stat, err := fs.ReadFile(g.root, path.Join(g.dir, "memory.stat"))
	if err != nil {
		return held, limit, true
	}
	for line := range strings.Lines(string(stat)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		for _, k := range g.files.cache {
			if key == k {
				n, _ := strconv.ParseInt(value, 10, 64)
				held -= n
			}
		}
	}
	return held, limit, true
}
