package upstream

import (
	"context"
	"net"
	"time"

	"culvert.dev/tunnel"
)

// raceDelay is how long a dial has the field to itself before the next one starts,
// as RFC 8305 section 5 has it of connection attempts.
const raceDelay = 300 * time.Millisecond

// race calls dial with 0 to n-1, of which n is not 0, and returns the first connection.
// The next dial starts when the one before has failed, or has not answered within
// raceDelay. The others are given up, and what they connect all the same is closed.
func race(ctx context.Context, n int, dial func(ctx context.Context, i int) (net.Conn, error)) (net.Conn, error) {
	if n == 1 {
		return dial(ctx, 0)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		c   net.Conn
		err error
	}
	results, over := make(chan result), make(chan struct{})
	defer close(over)
	started := 0
	start := func() {
		i := started
		started++
		go func() {
			var r result
			defer func() {
				if v := recover(); v != nil {
					r.err = tunnel.Caught(v)
				}
				select {
				case results <- r:
				case <-over:
					if r.c != nil {
						_ = r.c.Close()
					}
				}
			}()
			r.c, r.err = dial(ctx, i)
		}()
	}
	next := time.NewTimer(raceDelay)
	defer next.Stop()
	start()
	for failed := 0; ; {
		select {
		case r := <-results:
			if failed++; r.err == nil || failed == n || ctx.Err() != nil {
				return r.c, r.err
			}
		case <-next.C:
		}
		if started < n {
			start()
			next.Reset(raceDelay)
		}
	}
}
