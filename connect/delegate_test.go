package connect

import (
	"errors"
	"slices"
	"testing"

	"culvert.dev/tunnel"
)

// The field is read of clients with a verified certificate alone, however it is spelled. What
// anybody else states, in the clear, by a password or without a gateway that asks, has no
// meaning.
func TestCallersAreStatedByCertificatesAlone(t *testing.T) {
	mtls := tunnel.Peer{ID: "spiffe://corp.example/gw", Method: "mtls"}
	for _, row := range []struct {
		name   string
		peer   tunnel.Peer
		tls    *tunnel.EndedTLS
		fields Fields
		stated []string // nil where nobody is asked
	}{
		{"a certificate", mtls, &tunnel.EndedTLS{Peer: mtls}, Fields{{"Culvert-Peer", "a"}}, []string{"a"}},
		{"a token beside it", tunnel.Peer{ID: "gw", Method: "jwt"}, &tunnel.EndedTLS{Peer: mtls}, Fields{{"culvert-peer", "a"}}, []string{"a"}},
		{"several", mtls, &tunnel.EndedTLS{Peer: mtls}, Fields{{"Culvert-Peer", "a"}, {"CULVERT_PEER", "b"}, {"culvert-Peer", ""}}, []string{"a", "b", ""}},
		{"none", mtls, &tunnel.EndedTLS{Peer: mtls}, Fields{{"Culvert-Peers", "a"}, {"Peer", "b"}}, nil},
		{"TLS without a certificate", tunnel.Peer{}, &tunnel.EndedTLS{}, Fields{{"Culvert-Peer", "a"}}, nil},
		{"a password in TLS", tunnel.Peer{ID: "alice", Method: "basic"}, &tunnel.EndedTLS{}, Fields{{"Culvert-Peer", "a"}}, nil},
		{"in the clear", tunnel.Peer{}, nil, Fields{{"Culvert-Peer", "a"}}, nil},
		{"a Unix socket", tunnel.Peer{ID: "uid:0", Method: "unix"}, nil, Fields{{"Culvert-Peer", "a"}}, nil},
	} {
		var stated []string
		p := &Protocol{Delegate: func(_ *tunnel.Request, got Stated) (tunnel.Peer, error) {
			stated = got.Callers
			return tunnel.Peer{ID: "caller", Method: "mtls"}, nil
		}}
		req := &tunnel.Request{Peer: row.peer, TLS: row.tls}
		if _, err := p.Admit(t.Context(), req, "svc.test:443", row.fields); err != nil {
			t.Fatal(err)
		}
		want := row.peer
		if row.stated != nil {
			want.ID, want.Method = "caller", "mtls"
		}
		if !slices.Equal(stated, row.stated) || req.Peer.ID != want.ID || req.Peer.Method != want.Method {
			t.Errorf("%s: %q was asked about, and the caller is %+v; want %q and %+v", row.name, stated, req.Peer, row.stated, want)
		}
		if _, err := new(Protocol).Admit(t.Context(), &tunnel.Request{Peer: row.peer, TLS: row.tls}, "svc.test:443", row.fields); err != nil {
			t.Errorf("%s: without Delegate: %v", row.name, err)
		}
	}
	wrong := errors.New("expired")
	p := &Protocol{Delegate: func(*tunnel.Request, Stated) (tunnel.Peer, error) { return tunnel.Peer{}, wrong }}
	_, err := p.Admit(t.Context(), &tunnel.Request{Peer: mtls, TLS: &tunnel.EndedTLS{Peer: mtls}}, "svc.test:443", Fields{{"Culvert-Peer", "a"}})
	if tunnel.ReasonOf(err) != tunnel.NoAuth || !errors.Is(err, wrong) {
		t.Errorf("got %v, want %s", err, tunnel.NoAuth)
	}
}
