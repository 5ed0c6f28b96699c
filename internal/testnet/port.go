package testnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"testing"
)

// FreePort returns an address of loopback where nobody listens, by TCP or by UDP,
// for a program that is to listen there. Until the end of the test no other call
// returns it, of this process or of another one. The kernel takes no port of this
// range for a connection or for a listener that asks for any port.
func FreePort(t testing.TB) string {
	t.Helper()
	addr, release, err := ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return addr
}

// ReservePort is FreePort for one that calls release at its end.
func ReservePort() (addr string, release func(), err error) {
	const first, ports = 10000, 10000 // those of integration/bench are above
	for range 1000 {
		port := first + rand.IntN(ports)
		release, ok := reserve(port)
		if !ok {
			continue
		}
		if addr = fmt.Sprintf("127.0.0.1:%d", port); isFree(addr) {
			return addr, release, nil
		}
		release()
	}
	return "", nil, errors.New("testnet: no port is free")
}

// reserve makes port this process's own among those that call it, where there are
// names that end with the process that has them.
func reserve(port int) (release func(), ok bool) {
	if runtime.GOOS != "linux" {
		return func() {}, true
	}
	ln, err := net.Listen("unix", fmt.Sprintf("@culvert test port %d", port))
	if err != nil {
		return nil, false
	}
	return func() { _ = ln.Close() }, true
}

func isFree(addr string) bool {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return false
	}
	defer ln.Close()
	pc, err := net.ListenPacket("udp", addr)
	if err != nil {
		return false
	}
	_ = pc.Close()
	return true
}
