package upstream

import (
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Services with the same TLS settings share the parsed ones.
func TestEqualTLSIsShared(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	layer := func(serverName string) Layer {
		t.Helper()
		made, err := up.New(&registry.Service{TLS: &registry.BackendTLS{ServerName: serverName}}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return made.(*layered).layers[0]
	}
	first := layer("db.test")
	if layer("db.test") != first {
		t.Error("equal settings are parsed twice")
	}
	if layer("mail.test") == first {
		t.Error("another server name has the settings of the first")
	}
}
