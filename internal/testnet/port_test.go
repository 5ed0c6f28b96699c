package testnet

import (
	"net"
	"testing"
)

func TestFreePort(t *testing.T) {
	seen := map[string]bool{}
	for range 200 {
		addr := FreePort(t)
		if seen[addr] {
			t.Fatalf("%s was returned twice", addr)
		}
		seen[addr] = true
		if !isFree(addr) {
			t.Errorf("%s is not free", addr)
		}
	}
	addr := FreePort(t)
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if isFree(addr) {
		t.Errorf("%s is free, and is listened at", addr)
	}
	if release, ok := reserve(ln.Addr().(*net.TCPAddr).Port); ok {
		release()
		t.Error("a port was reserved twice")
	}
}
