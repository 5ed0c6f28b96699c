package gateway

import (
	"context"
	"net"
	"path/filepath"

	"culvert.dev/internal/admin"
	"culvert.dev/tunnel"
)

// newAdminPort returns the admin port of the configuration, which may move.
func newAdminPort(g *Gateway, guard *tunnel.Guard) *socketSet[string] {
	return &socketSet[string]{
		tableWatcher: newTableWatcher(), g: g, guard: guard, admin: true,
		wanted: func() []string {
			if a := g.settings.Load().Admin; a != "" {
				return []string{cleanAdmin(a)}
			}
			return nil
		},
		listen: g.listenAdmin,
		opened: func(s *ownSocket[string]) { g.log.Info("serving the admin port", "address", s.addr.String()) },
		failed: func(address string, err error) {
			g.log.Warn("cannot serve the admin port", "address", address, "err", err)
		},
		closed: func(_, addr string) { g.log.Info("closed the admin port", "address", addr) },
	}
}

// cleanAdmin returns an admin address so that the same path of a socket is the same
// string.
func cleanAdmin(address string) string {
	if path, ok := admin.SocketPath(address); ok {
		return "unix:" + filepath.Clean(path)
	}
	return address
}

// listenAdmin opens the admin port at an address.
func (g *Gateway) listenAdmin(ctx context.Context, address string) (*ownSocket[string], error) {
	if err := admin.CheckAddr(address, g.settings.Load().AdminRemote); err != nil {
		return nil, err
	}
	ln, err := admin.Listen(ctx, address)
	if err != nil {
		return nil, err
	}
	o := &ownSocket[string]{key: address, addr: ln.Addr()}
	o.serve = func(ctx context.Context) error { return g.adminServer().Serve(ctx, ln) }
	o.drain = func() { o.cancel() }
	o.close = func() { _ = ln.Close() }
	return o, nil
}

// AdminAddr returns the address of the admin port; nil means that there is none.
func (g *Gateway) AdminAddr() net.Addr {
	if all := g.adminPort.addrs(); len(all) > 0 {
		return all[0]
	}
	return nil
}

// listenHealth opens the health port, which stays where it is.
func (g *Gateway) listenHealth(ctx context.Context, guard *tunnel.Guard) (err error) {
	if g.cfg.Health == "" {
		return nil
	}
	if err := admin.CheckAddr(g.cfg.Health, true); err != nil {
		return err
	}
	if g.healthLn, err = admin.Listen(ctx, g.cfg.Health); err == nil {
		guard.OwnAdmin(g.healthLn.Addr())
	}
	return err
}

// A StatusAdmin is the admin port.
type StatusAdmin struct {
	Configured string `json:"configured"`
	Address    string `json:"address"` // "" where it is not open
	Problem    string `json:"problem,omitempty"`
}

// adminStatus returns the admin port that is configured, and one that stays open in its
// place.
func (g *Gateway) adminStatus() (all []StatusAdmin) {
	for _, st := range g.adminPort.states() {
		s := StatusAdmin{Configured: st.key, Problem: st.problemText()}
		if st.addr != nil {
			s.Address = addressText(st.addr)
		}
		all = append(all, s)
	}
	return all
}

// addressText returns an address as those of the configuration are written.
func addressText(a net.Addr) string {
	if a.Network() == "unix" {
		return "unix:" + a.String()
	}
	return a.String()
}
