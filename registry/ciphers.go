package registry

import (
	"crypto/tls"
	"fmt"
	"slices"

	"culvert.dev/tunnel"
)

// ParseCipherSuite returns the number of a cipher suite of TLS 1.2 by its name in
// crypto/tls, which is that of IANA: "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256". It
// refuses suites that are insecure, and those of TLS 1.3, which can't be chosen.
func ParseCipherSuite(name string) (uint16, error) {
	for _, s := range tls.CipherSuites() {
		switch {
		case s.Name != name:
		case !slices.Contains(s.SupportedVersions, tls.VersionTLS12):
			return 0, fmt.Errorf("cipher suite %s is of TLS 1.3, whose suites are always those of the Go library", name)
		default:
			return s.ID, nil
		}
	}
	for _, s := range tls.InsecureCipherSuites() {
		if s.Name == name {
			return 0, fmt.Errorf("cipher suite %s is insecure", name)
		}
	}
	return 0, fmt.Errorf("cipher suite %q is not known", tunnel.Clip(name))
}

// CipherSuites returns the names that ParseCipherSuite accepts.
func CipherSuites() []string {
	var names []string
	for _, s := range tls.CipherSuites() {
		if slices.Contains(s.SupportedVersions, tls.VersionTLS12) {
			names = append(names, s.Name)
		}
	}
	return names
}
