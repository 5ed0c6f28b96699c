package unixsocket

import (
	"errors"
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"
)

// An abstract socket has no file, and is free again once it is closed.
func TestAbstractSocket(t *testing.T) {
	t.Chdir(t.TempDir())
	name := "@culvert-test-" + strconv.Itoa(os.Getpid())
	ln := open(t, Config{Path: name})
	if got := ln.Addr().String(); got != name {
		t.Errorf("got address %q, want %q", got, name)
	}
	c, err := net.Dial("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if files, err := os.ReadDir("."); len(files) != 0 || err != nil {
		t.Errorf("got %v, %v, want no file", files, err)
	}
	if _, err := Listen(t.Context(), Config{Path: name}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second listener: %v, want that it is in use", err)
	}
	_ = ln.Close()
	open(t, Config{Path: name})
}

func TestMapsAll(t *testing.T) {
	for m, want := range map[string]bool{
		"         0          0 4294967295\n":                                   true,
		"         0       1000          1\n":                                   false,
		"         0          0      65536\n":                                   false,
		"         0     100000      65536\n     65536          0          1\n": false,
		"         0          0 4294967295\n         0          0 4294967295\n": false,
		"":                                   false,
		"         1          1 4294967294\n": false,
	} {
		if got := mapsAll([]byte(m)); got != want {
			t.Errorf("%q: got %v, want %v", m, got, want)
		}
	}
}
