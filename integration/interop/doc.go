// Package interop tests the culvert binary against real programs: curl, nginx,
// openssl, GnuTLS, step-ca, go-spiffe, Python, Node, Java, git, netcats, ssh, ngtcp2, Chromium, dig, quic-go, jose, oidc-provider
// and Go's own HTTP client, all on loopback. It has tests only. One is in network namespaces, with
// the tag netns, and needs root.
//
// The binary is built once, or is the one that $CULVERT names. A peer that is
// not installed fails its test: "make peers" installs them. Only tests with packages of npm
// are left out where npm cannot get them.
package interop
