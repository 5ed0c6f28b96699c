package socks5

import (
	"context"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = 30 * time.Second

// serve starts a gateway whose connections end by themselves. Its table has
// what asks for "host:port" lead to an address.
func serve(t *testing.T, table tunneltest.Table, ps ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	return tunneltest.Serve(t, tunneltest.Setup{
		Protocols: ps, Resolver: guarded{table}, Limits: tunnel.Limits{ConnectionRatePerClient: -1}, Drained: true,
	})
}

// guarded is a table that refuses the addresses that nobody may ask for, as
// the registry's does.
type guarded struct{ tunneltest.Table }

func (g guarded) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if why, bad := tunnel.Forbidden(req.Addr); req.Addr.IsValid() && bad && g.Table[req.Target()] == "" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.Prohibited, "%q is %s", req.Target(), why)
	}
	return g.Table.Resolve(ctx, req)
}
