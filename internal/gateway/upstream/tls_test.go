package upstream

import (
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Services with the same TLS settings share the parsed ones.
func TestEqualTLSIsShared(t *testing.T) {
	d := &Dialers{Direct: &tunnel.NetDialer{}}
	defer d.Close()
	dialer := func(serverName string) *tlsDialer {
		t.Helper()
		made, err := d.To(&registry.Service{TLS: &registry.BackendTLS{ServerName: serverName}})
		if err != nil {
			t.Fatal(err)
		}
		return made.(*tlsDialer)
	}
	first := dialer("db.test")
	if dialer("db.test").tlsConfig != first.tlsConfig {
		t.Error("equal settings are parsed twice")
	}
	if dialer("mail.test").tlsConfig == first.tlsConfig {
		t.Error("another server name has the settings of the first")
	}
}
