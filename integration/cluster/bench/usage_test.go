package bench

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// cpu is the processor time that culvert has taken, user and system.
func (r *rig) cpu() time.Duration {
	r.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.culvert.Pid()))
	if err != nil {
		r.t.Fatal(err)
	}
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	var ticks int64
	for _, field := range f[11:13] { // 14 and 15 of proc(5): utime, stime
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			r.t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 on Linux
}

// A usage is memory, in MiB.
type usage struct{ rss, peak, pss, heap float64 }

func (r *rig) usage() (u usage) {
	r.t.Helper()
	kib := func(file, field string) float64 {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", r.culvert.Pid(), file))
		if err != nil {
			r.t.Fatal(err)
		}
		_, after, ok := strings.Cut("\n"+string(data), "\n"+field+":")
		if !ok {
			r.t.Fatalf("no %s in %s", field, file)
		}
		v, err := strconv.ParseFloat(strings.Fields(after)[0], 64)
		if err != nil {
			r.t.Fatal(err)
		}
		return v / 1024
	}
	u.rss, u.peak, u.pss = kib("status", "VmRSS"), kib("status", "VmHWM"), kib("smaps_rollup", "Pss")
	page, err := r.ask(r.t.Context(), "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(page)) {
		if v, ok := strings.CutPrefix(line, "go_gc_heap_live_bytes "); ok {
			if u.heap, err = strconv.ParseFloat(strings.TrimSpace(v), 64); err != nil {
				r.t.Fatal(err)
			}
			u.heap /= 1 << 20
		}
	}
	return u
}

// machine names what the figures were taken on.
func machine() string {
	model := "unknown CPU"
	data, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
			model = strings.TrimSpace(value)
			break
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%s, %d cores, Linux %s, %s", model, runtime.NumCPU(), strings.TrimSpace(string(kernel)), runtime.Version())
}

// busy is the load average of the machine.
func busy() string {
	data, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(data))
	if len(f) < 3 {
		return "unknown"
	}
	return f[0]
}
