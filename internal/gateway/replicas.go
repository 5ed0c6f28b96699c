package gateway

import (
	"cmp"
	"errors"

	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// Replicas says where the other replicas of this gateway are.
type Replicas struct {
	To  []string     // HOST:PORT; this process may be among them
	Hop registry.Hop // how they are asked; its Peers are the SPIFFE ids of replicas
}

// config returns r as the package reverse has it.
func (r *Replicas) config() *reverse.ReplicaConfig {
	if r == nil {
		return nil
	}
	return &reverse.ReplicaConfig{To: r.To, IDs: r.Hop.Peers, Hop: r.Hop}
}

// newReplicas makes what tells the other replicas which sessions this one has. Replicas have
// one pseudonym, and for requests that go from one to another each has its own: the second
// replica would find a loop.
func (g *Gateway) newReplicas(direct *tunnel.NetDialer, budget *tunnel.Budget) {
	g.toReplicas = &upstream.Transports{
		Direct: direct, Budget: budget, Identity: g.cfg.Identity, Log: g.log,
		CurrentVia: func() string { return g.via() + "-" + g.sessions.Replica() },
	}
	g.replicas = &reverse.Replicas{Server: g.sessions, Lookup: g.cfg.Lookup, NewTransport: g.replicaTransport, Log: g.log}
	g.groups.PassedOn = g.replicas.PassedOn
	g.handler.handlers[reverse.ReplicasName] = reservedName{Handler: g.replicas}
	g.handler.restore = g.replicas.Restore
	g.replicas.Use(g.cfg.Replicas.config())
}

// replicaTransport returns the transport to the replica at an address. The ClientHello asks for
// name where no other name is configured; hbone sends none.
func (g *Gateway) replicaTransport(c *reverse.ReplicaConfig, address, name string) (tunnel.Transport, error) {
	hop, ok := c.Hop.(registry.Hop)
	if !ok {
		return nil, errors.New("gateway: replicas are not configured")
	}
	switch hop.Proto {
	case "connect", "connect-h2":
		address = "https://" + address
	}
	if hop.Proto != "hbone" {
		hop.ServerName = cmp.Or(hop.ServerName, name)
	}
	hop.Addresses = []string{address}
	return g.toReplicas.NextHop([]registry.Hop{hop})
}
