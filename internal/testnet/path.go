package testnet

import (
	"context"
	"net"
	"sync"
	"testing"
)

// A Dialer opens the client's end of a path.
type Dialer interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// TestPath shows that a path changes nothing: each direction ends as it was
// ended (TestEndings), and of random exchanges every byte arrives (Run). setup
// makes the path to service and returns what dials it and the address that is
// asked for. The preamble is what the client begins with and the service has to
// get; see Backend.Through.
func TestPath(t *testing.T, setup func(t *testing.T, service string) (d Dialer, addr string), preamble []byte) {
	b := NewBackend(t)
	d, addr := setup(t, b.Addr())
	dial := b.Through(func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }, preamble)
	TestEndings(t, dial, Transparent())
	t.Run("chaos", func(t *testing.T) {
		const runs, most = 30, 2 << 20
		seeds := make(chan uint64)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for seed := range seeds {
					Run(t.Context(), t, dial, Random(seed, most))
				}
			})
		}
		for seed := range uint64(runs) {
			seeds <- seed
		}
		close(seeds)
		wg.Wait()
	})
}
