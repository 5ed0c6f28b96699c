//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// family returns pid and its descendants.
func family(pid int) []int {
	all := []int{pid}
	parents := make(map[int][]int)
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if id, err := strconv.Atoi(e.Name()); err == nil {
			if f := stat(id); len(f) > 1 {
				if parent, err := strconv.Atoi(f[1]); err == nil {
					parents[parent] = append(parents[parent], id)
				}
			}
		}
	}
	for i := 0; i < len(all); i++ {
		all = append(all, parents[all[i]]...)
	}
	return all
}

// stat returns the fields of /proc/PID/stat from the third on, the state;
// proc(5) numbers them from one.
func stat(pid int) []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	return strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
}

// cpu returns the processor time of the processes so far, user and system. It
// is taken from the scheduler, in nanoseconds, for each thread that still runs:
// the ticks of /proc/PID/stat are of 10 ms.
func cpu(pids []int) (sum time.Duration) {
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // a thread that has ended
			}
			if first := bytes.Fields(text); len(first) > 0 {
				n, _ := strconv.ParseInt(string(first[0]), 10, 64)
				sum += time.Duration(n)
			}
		}
	}
	return sum
}

// pss returns the proportional set size of the processes in KiB.
func pss(pids []int) (float64, error) {
	sum := 0.0
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, err
		}
		_, after, ok := strings.Cut(string(data), "\nPss:")
		if !ok {
			return 0, fmt.Errorf("no Pss in smaps_rollup of %d", pid)
		}
		kib, err := strconv.ParseFloat(strings.Fields(after)[0], 64)
		if err != nil {
			return 0, fmt.Errorf("smaps_rollup of %d: %w", pid, err)
		}
		sum += kib
	}
	return sum, nil
}

// descriptors returns how many the processes have open.
func descriptors(pids []int) (int, error) {
	sum := 0
	for _, pid := range pids {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return 0, err
		}
		sum += len(entries)
	}
	return sum, nil
}

// machine names what the numbers were taken on.
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
	return fmt.Sprintf("%s, %d cores, Linux %s", model, runtime.NumCPU(), strings.TrimSpace(string(kernel)))
}
