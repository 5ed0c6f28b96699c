package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGatewayAccess checks that no flag for gateways is dropped beside the identity of a device.
func TestGatewayAccess(t *testing.T) {
	files := credentialFiles{cert: filepath.Join(t.TempDir(), "me.pem")}
	if err := os.WriteFile(files.cert, []byte("-----BEGIN PRIVATE KEY-----"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		access gatewayAccess
		want   string // the error
	}{
		"a SPIFFE ID beside --state":   {gatewayAccess{state: "x", peers: []string{"spiffe://corp.example/gw"}}, "--state has an identity"},
		"a certificate beside --state": {gatewayAccess{state: "x", credentialFiles: files}, "--state has an identity"},
		"a SPIFFE ID alone":            {gatewayAccess{peers: []string{"spiffe://corp.example/gw"}}, "gateways refuse callers without credentials"},
		"a key alone":                  {gatewayAccess{credentialFiles: credentialFiles{key: "me.key"}}, "--key needs --cert"},
		"a folder without a device":    {gatewayAccess{state: "x"}, "no device has joined"},
		"a file that is not there":     {gatewayAccess{credentialFiles: credentialFiles{cert: "gone.pem"}}, "gone.pem: no such file"},
		"a certificate":                {gatewayAccess{credentialFiles: files}, ""},
	} {
		err := row.access.useJoined()
		if err == nil {
			err = row.access.check()
		}
		if row.want == "" {
			if err != nil || !filepath.IsAbs(row.access.cert) || row.access.key != row.access.cert {
				t.Errorf("%s: got %v and %+v, want the key of the certificate's file", name, err, row.access)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: got %v, want %q", name, err, row.want)
		}
	}
}
