// Package race dials several addresses of one host, as Happy Eyeballs does
// (RFC 8305): an address that does not answer delays a connection by little.
//
//	c, err := race.First(ctx, len(addrs), func(ctx context.Context, i int) (net.Conn, error) {
//		return dialer.DialContext(ctx, "tcp", addrs[i])
//	}, func(c net.Conn) { _ = c.Close() })
//
// It looks no names up and sorts no addresses.
package race

import (
	"context"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Delay is how long an address has to answer before the next one is dialed as well: the
// "Connection Attempt Delay" of RFC 8305 section 5, which recommends 250 ms and allows up to 2 s.
const Delay = 300 * time.Millisecond

// First calls dial with 0 to n-1 and returns the first result without an error, or else the last
// error; n is at least 1. The next dial starts when one has failed, or when the one before has not
// ended within Delay.
//
// The context of the other dials is canceled. First waits for their ends, and calls discard with
// the result of each that succeeds nevertheless: dial has to return soon after its context ends.
func First[T any](ctx context.Context, n int, dial func(ctx context.Context, i int) (T, error), discard func(T)) (T, error) {
	if n == 1 {
		return dial(ctx, 0)
	}
	type result struct {
		value T
		err   error
	}
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan result, n)
	var dials sync.WaitGroup
	defer func() {
		cancel()
		dials.Wait()
		close(results)
		for r := range results {
			if r.err == nil {
				discard(r.value)
			}
		}
	}()
	next := time.NewTimer(0)
	defer next.Stop()
	for started, ended := 0, 0; ; {
		select {
		case r := <-results:
			if ended++; r.err == nil || ended == n || ctx.Err() != nil {
				return r.value, r.err
			}
		case <-next.C:
		}
		if started == n {
			continue
		}
		i := started
		started++
		next.Reset(Delay)
		dials.Go(func() {
			var r result
			defer func() {
				if v := recover(); v != nil {
					r.err = tunnel.Caught(v)
				}
				results <- r
			}()
			r.value, r.err = dial(ctx, i)
		})
	}
}
