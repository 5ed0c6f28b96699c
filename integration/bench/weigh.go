//go:build linux

package main

import (
	"context"
	"math"
	"time"
)

// weigh starts the peer afresh and returns the memory in KiB and the
// descriptors that each connection of a kind costs it. It is the slope from a
// quarter of n connections to n: what the first ones ever make, and the size a
// heap has anyway, is in both.
func (s *suite) weigh(ctx context.Context, p *peer, op string, n int) (kib, fds float64, err error) {
	if p.command == nil {
		return 0, 0, nil
	}
	if p.tunnels > 0 {
		n = min(n, p.tunnels)
	}
	fresh, err := p.start(ctx, s.rig)
	if err != nil {
		return 0, 0, err
	}
	defer fresh.stop()
	if _, err := s.do(ctx, fresh, job{Op: "conns", N: 8, Time: 100 * time.Millisecond}); err != nil {
		return 0, 0, err
	}
	defer func() {
		if _, rerr := s.load.do(ctx, job{Op: "release"}); err == nil {
			err = rerr
		}
	}()
	var mem [2]float64
	var open [2]int
	for i, more := range []int{n / 4, n - n/4} {
		if _, err := s.do(ctx, fresh, job{Op: op, N: more}); err != nil {
			return 0, 0, err
		}
		if p.collect != nil {
			if err := pause(ctx, s.rest); err != nil {
				return 0, 0, err
			}
		}
		if mem[i], open[i], err = s.settled(ctx, fresh); err != nil {
			return 0, 0, err
		}
	}
	more := float64(n - n/4)
	return (mem[1] - mem[0]) / more, float64(open[1]-open[0]) / more, nil
}

// settled returns the peer's memory in KiB and its descriptors once the memory
// stands still. A peer with a garbage collector is made to collect: Go does so
// by itself every two minutes, and gives what is free back to the system.
func (s *suite) settled(ctx context.Context, p *running) (mem float64, fds int, err error) {
	const (
		still = 32 // KiB
		looks = 20
	)
	last := math.Inf(1)
	for range looks {
		if p.collect != nil {
			if err := p.collect(ctx, p); err != nil {
				return 0, 0, err
			}
		}
		if err := pause(ctx, s.settle); err != nil {
			return 0, 0, err
		}
		if mem, err = pss(p.pids); err != nil {
			return 0, 0, err
		}
		if math.Abs(mem-last) <= still {
			break
		}
		last = mem
	}
	fds, err = descriptors(p.pids)
	return mem, fds, err
}
