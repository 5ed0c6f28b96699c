//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

const tick = 10 * time.Millisecond // of utime and stime, USER_HZ is 100 on Linux

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

// cpu returns the processor time of the processes so far, user and system.
func cpu(pids []int) time.Duration {
	var sum time.Duration
	for _, pid := range pids {
		f := stat(pid)
		if len(f) < 13 {
			continue
		}
		for _, field := range f[11:13] { // 14 and 15: utime, stime
			n, err := strconv.ParseInt(field, 10, 64)
			if err == nil {
				sum += time.Duration(n) * tick
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
