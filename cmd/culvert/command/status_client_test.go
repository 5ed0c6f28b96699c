package command

import (
	"testing"

	"culvert.dev/internal/gateway"
)

func TestStatusNamesClientsAtALimit(t *testing.T) {
	for _, c := range []struct {
		client gateway.StatusClient
		full   bool
		want   string
	}{
		{gateway.StatusClient{Client: "alice", Principal: true, Tunnels: 18, MaxTunnels: 20}, true, "principal alice has 18 of 20 tunnels"},
		{gateway.StatusClient{Client: "alice", Principal: true, Tunnels: 17, MaxTunnels: 20}, false, "principal alice has 17 of 20 tunnels"},
		{gateway.StatusClient{Client: "192.0.2.1", Tunnels: 3, MaxTunnels: 20, Connections: 20, MaxConnections: 20}, true,
			"client 192.0.2.1 has 3 of 20 tunnels, 20 of 20 connections"},
		{gateway.StatusClient{Client: "192.0.2.1", Tunnels: 30, Connections: 20}, false, "client 192.0.2.1 has "},
	} {
		if got, full := describeClient(&c.client), c.client.Full(); got != c.want || full != c.full {
			t.Errorf("%+v: got %q, full %v; want %q, %v", c.client, got, full, c.want, c.full)
		}
	}
}
