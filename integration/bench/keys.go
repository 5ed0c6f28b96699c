//go:build linux

package main

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"culvert.dev/internal/testca"
)

// keysVar is where the processes of a benchmark find the keys that makeKeys
// made.
const keysVar = "CULVERT_BENCH_KEYS"

// identity is whose certificate all of them have.
const identity = "spiffe://bench.test/bench"

// makeKeys makes a CA in dir, and a certificate for both ends of whatever is
// TLS to a proxy. Children of this process find them.
func makeKeys(dir string) error {
	ca, err := testca.New("bench.test", nil)
	if err != nil {
		return err
	}
	pair, err := ca.Issue(testca.Options{
		SPIFFEID: identity, DNSNames: []string{quicName}, IPs: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(127, 0, 0, 2), net.ParseIP(farHost)}, Usage: testca.Both,
	})
	if err != nil {
		return err
	}
	if err := ca.Save(dir); err != nil {
		return err
	}
	if err := pair.Save(dir, "bench"); err != nil {
		return err
	}
	return os.Setenv(keysVar, dir)
}

// haveKeys reports whether makeKeys was called for this process.
func haveKeys() bool { return os.Getenv(keysVar) != "" }

func keyFile(name string) string { return filepath.Join(os.Getenv(keysVar), name) }

// toProxy is what clients speak TLS to a proxy with.
func toProxy() *tls.Config {
	pair, err := tls.LoadX509KeyPair(keyFile("bench.crt"), keyFile("bench.key"))
	if err != nil {
		panic(fmt.Sprintf("bench: no keys: %v", err)) // makeKeys has made them
	}
	ca, err := testca.Load(os.Getenv(keysVar), nil)
	if err != nil {
		panic(fmt.Sprintf("bench: no keys: %v", err))
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: ca.Pool()}
}

// apart is a second address with the same port: what ends TLS listens there.
func apart(addr string) string { return by(addr, "127.0.0.2") }
