package upstream

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A conn tells whether it was closed.
type conn struct {
	net.Conn
	closed bool
}

func (c *conn) Close() error { c.closed = true; return nil }

// A race has the first connection, and closes what comes after it.
func TestRace(t *testing.T) {
	errRefused := errors.New("refused")
	type answer struct {
		after time.Duration // as long as the context if it is negative
		err   error
	}
	for name, row := range map[string]struct {
		answers []answer
		want    int // the winner, -1 for none
		took    time.Duration
		started int
	}{
		"one":                       {[]answer{{10 * time.Millisecond, nil}}, 0, 10 * time.Millisecond, 1},
		"the first":                 {[]answer{{299 * time.Millisecond, nil}, {0, nil}}, 0, 299 * time.Millisecond, 1},
		"the first is silent":       {[]answer{{-1, nil}, {10 * time.Millisecond, nil}, {0, nil}}, 1, 310 * time.Millisecond, 2},
		"two are silent":            {[]answer{{-1, nil}, {-1, nil}, {10 * time.Millisecond, nil}}, 2, 610 * time.Millisecond, 3},
		"the first fails at once":   {[]answer{{time.Millisecond, errRefused}, {time.Millisecond, nil}}, 1, 2 * time.Millisecond, 2},
		"the first is late, and is": {[]answer{{400 * time.Millisecond, nil}, {-1, nil}}, 0, 400 * time.Millisecond, 2},
		"all fail":                  {[]answer{{0, errRefused}, {0, errRefused}, {0, errRefused}}, -1, 0, 3},
		"all are silent":            {[]answer{{-1, nil}, {-1, nil}}, -1, 3 * time.Second, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				conns := make([]*conn, len(row.answers))
				var started atomic.Int32
				begin := time.Now()
				c, err := race(ctx, len(row.answers), func(ctx context.Context, i int) (net.Conn, error) {
					started.Add(1)
					a := row.answers[i]
					if a.after < 0 {
						<-ctx.Done()
						conns[i] = &conn{} // it came all the same, too late
						return conns[i], nil
					}
					time.Sleep(a.after)
					if a.err != nil {
						return nil, a.err
					}
					conns[i] = &conn{}
					return conns[i], nil
				})
				took := time.Since(begin)
				synctest.Wait()
				if n := int(started.Load()); took != row.took || n != row.started {
					t.Errorf("it took %v and %d dials, want %v and %d", took, n, row.took, row.started)
				}
				for i, one := range conns {
					if one != nil && one.closed == (i == row.want) && row.want >= 0 {
						t.Errorf("connection %d is closed: %t, want all but %d", i, one.closed, row.want)
					}
				}
				if row.want >= 0 && (err != nil || c != net.Conn(conns[row.want])) {
					t.Errorf("got %v, %v, want connection %d", c, err, row.want)
				}
				if name == "all fail" && !errors.Is(err, errRefused) {
					t.Errorf("got %v, want %v", err, errRefused)
				}
			})
		})
	}
}
