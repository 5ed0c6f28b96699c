//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// profile takes a CPU profile and a profile of allocations of culvert under
// each load, writes them to folder and writes the top of each to
// out.
func (s *suite) profile(ctx context.Context, folder string, out io.Writer) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	stop, err := s.cast()
	if err != nil {
		return err
	}
	defer stop()
	loads := map[string]job{
		"conns1":  {Op: "conns", N: 1},
		"conns64": {Op: "conns", N: 64},
		"trips64": {Op: "trips", N: 64},
		"up16":    {Op: "up", N: 16},
		"down16":  {Op: "down", N: 16},
	}
	for _, name := range []string{"conns1", "conns64", "trips64", "up16", "down16"} {
		if !s.only.MatchString(name) {
			continue
		}
		run, err := peers(s.rig.culvert)[0].start(ctx, s.rig)
		if err != nil {
			return err
		}
		err = s.profileOne(ctx, run, name, loads[name], folder, out)
		run.stop()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// profileOne takes both profiles of one load.
func (s *suite) profileOne(ctx context.Context, run *running, name string, j job, folder string, out io.Writer) error {
	if _, err := s.load.do(ctx, job{Op: "conns", To: run.addr, N: 16, Time: s.slice / 4}); err != nil {
		return err
	}
	seconds := max(int(s.slice.Seconds()), 1)
	kinds := []struct{ file, url, index, sort string }{
		{name + ".cpu.pprof", "profile", "cpu", "-cum"}, // flat, it is all system calls
		{name + ".allocs.pprof", "allocs", "alloc_space", "-flat"},
	}
	errs := make([]error, len(kinds))
	var wg sync.WaitGroup
	for i, k := range kinds {
		wg.Go(func() {
			data, err := fetch(ctx, fmt.Sprintf("http://%s/debug/pprof/%s?seconds=%d", run.rig.admin, k.url, seconds))
			if err == nil {
				err = os.WriteFile(filepath.Join(folder, k.file), data, 0o644)
			}
			errs[i] = err
		})
	}
	j.To, j.Time = run.addr, time.Duration(seconds)*time.Second+200*time.Millisecond // a little past the profile's end
	r, err := s.load.do(ctx, j)
	wg.Wait()
	if err != nil {
		return err
	}
	for i, k := range kinds {
		if errs[i] != nil {
			return errs[i]
		}
		fmt.Fprintf(out, "\n== %s under %s: %d done, %d MB\n", k.index, name, r.Count, r.Bytes/1e6)
		top := exec.CommandContext(ctx, "go", "tool", "pprof", "-top", k.sort, "-nodecount=25", "-sample_index="+k.index, s.rig.culvert, filepath.Join(folder, k.file))
		top.Stdout, top.Stderr = out, os.Stderr
		if err := top.Run(); err != nil {
			return fmt.Errorf("go tool pprof: %w", err)
		}
	}
	return nil
}
