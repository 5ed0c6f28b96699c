//go:build linux && netns

// The tests need root, ip and nft; the tag keeps them out of a run that has
// Go alone:
//
//	go test -tags netns ./internal/testnet/netns

package netns

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestNamespaces(t *testing.T) {
	west, east := New(t, "west"), New(t, "east")
	_, eastIf := Link(t, west, "10.9.0.1/24", east, "10.9.0.2/24")
	ln, err := east.Listen("tcp", "10.9.0.2:443")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "hello from "+c.LocalAddr().String())
			_ = c.Close()
		}
	}()
	ask := func(d time.Duration) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		c, err := west.Dial(ctx, "tcp", "10.9.0.2:443")
		if err != nil {
			return "", err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		p, err := io.ReadAll(c)
		return string(p), err
	}
	const want = "hello from 10.9.0.2:443"
	if got, err := ask(time.Minute); got != want {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}
	if c, err := New(t, "north").Dial(t.Context(), "tcp", "10.9.0.2:443"); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("from a namespace without a link: %v, %v; want network is unreachable", c, err)
	}

	east.Drop(t, "tcp dport 443")
	if got, err := ask(200 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a drop rule: %q, %v; want a timeout", got, err)
	}
	east.Undrop(t)
	east.Reject(t, "tcp dport 443")
	if got, err := ask(time.Minute); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("with a reject rule: %q, %v; want connection refused", got, err)
	}
	east.Undrop(t)
	east.SetLink(t, eastIf, false)
	if got, err := ask(200 * time.Millisecond); err == nil {
		t.Errorf("with the link down: %q, want an error", got)
	}
	east.SetLink(t, eastIf, true)
	east.SetMTU(t, eastIf, 1280)
	if got, err := ask(time.Minute); got != want {
		t.Errorf("with all rules gone: %q, %v; want %q", got, err, want)
	}
	out, err := west.Command(t.Context(), "ip", "-o", "addr").Output()
	if err != nil || !strings.Contains(string(out), "10.9.0.1/24") || strings.Contains(string(out), " eth0 ") {
		t.Errorf("ip addr inside = %q, %v; want 10.9.0.1/24 and none of the outer interfaces", out, err)
	}
}

func TestDoReturnsOutside(t *testing.T) {
	outside, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ns := New(t, "x")
	var inside string
	if err := ns.Do(func() (err error) { inside, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	if inside == outside {
		t.Errorf("inside is %s, the same as outside", inside)
	}
	for range 100 {
		got := make(chan string)
		go func() {
			s, _ := os.Readlink("/proc/thread-self/ns/net")
			got <- s
		}()
		if s := <-got; s != outside {
			t.Fatalf("a goroutine afterwards is in %s, want %s", s, outside)
		}
	}
	wrong := errors.New("wrong")
	if err := ns.Do(func() error { return wrong }); err != wrong {
		t.Errorf("Do = %v, want the function's error", err)
	}
}
