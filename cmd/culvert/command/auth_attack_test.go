package command

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func hashOf(t testing.TB, password string, cost int) registry.Secret {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), cost)
	if err != nil {
		t.Fatal(err)
	}
	return registry.Secret(h)
}

// digestOf is how a file of tokens has one.
func digestOf(token string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(token)))
}

// guessCost makes a check slow enough that what waits behind 180 of them waits
// for seconds, also on a fast machine.
const guessCost = 8

// longestQueued is how long a check may wait for its turn, or nearly.
const longestQueued = 3 * time.Second

// from dials from an address of loopback.
func from(addr string) tunnel.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(addr)}}
}

// While one client guesses passwords, on many connections or on one, another
// one that was never there logs in within a second, by whichever carrier.
func TestGuessesLockNobodyOut(t *testing.T) {
	for _, attack := range []struct {
		name  string
		guess func(ctx context.Context, addr string, tried *atomic.Int64)
	}{
		{"180 connections", func(ctx context.Context, addr string, tried *atomic.Int64) {
			var all sync.WaitGroup
			for i := range 180 {
				all.Go(func() {
					for n := 0; ctx.Err() == nil; n++ {
						d := &connect.Dialer{Proxy: addr, Dialer: from("127.0.0.1"), Authorization: connect.BasicCredentials("alice", fmt.Sprint(i, n))}
						if c, err := d.DialContext(ctx, "tcp", "svc.test:443"); err == nil {
							_ = c.Close()
						}
						tried.Add(1)
					}
				})
			}
			all.Wait()
		}},
		{"100 streams", func(ctx context.Context, addr string, tried *atomic.Int64) {
			p := new(http.Protocols)
			p.SetUnencryptedHTTP2(true)
			way := &http.Transport{Protocols: p, DialContext: from("127.0.0.1").DialContext, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}
			defer way.CloseIdleConnections()
			var all sync.WaitGroup
			for i := range 100 {
				all.Go(func() {
					for n := 0; ctx.Err() == nil; n++ {
						r := (&http.Request{Method: http.MethodConnect, URL: &url.URL{Scheme: "http", Host: addr}, Host: "svc.test:443", Header: http.Header{
							"Proxy-Authorization": {connect.BasicCredentials("alice", fmt.Sprint(i, n))},
						}}).WithContext(ctx)
						if answer, err := way.RoundTrip(r); err == nil {
							_ = answer.Body.Close()
						}
						tried.Add(1)
					}
				})
			}
			all.Wait()
		}},
	} {
		t.Run(attack.name, func(t *testing.T) {
			var users strings.Builder
			for i := range 3 {
				fmt.Fprintf(&users, "user-%d:%s\n", i, string(hashOf(t, "secret", guessCost)))
			}
			fmt.Fprintf(&users, "alice:%s\n", string(hashOf(t, "secret", guessCost)))
			r := startFile(t, map[string]string{"users.txt": users.String(), "culvert.yaml": fmt.Sprintf(`
limits: {connectionRatePerClient: -1}
listeners:
  - {address: "127.0.0.1:1", protocols: [connect, connect-h2, socks5, websocket], auth: {usersFile: users.txt}}
services:
  - {name: svc.test, ports: [443], endpoints: [%q]}
`, testnet.Echo(t).Addr())})
			// A second, and what a few checks take on a machine that is slow or
			// busy: in one queue for all there would be dozens before each client.
			start := time.Now()
			hashOf(t, "secret", guessCost)
			most := time.Second + 8*time.Since(start)
			ctx, cancel := context.WithCancel(t.Context())
			var tried atomic.Int64
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				attack.guess(ctx, r.addrs[0], &tried)
			}()
			defer func() {
				cancel()
				<-ended
			}()
			testnet.Eventually(t, patience, func() bool { return tried.Load() > 50 }, "the attack is under way")
			for i := range 3 { // of which each logs in for the first time
				d := &connect.Dialer{
					Proxy: r.addrs[0], Dialer: from(fmt.Sprintf("127.0.0.%d", 2+i)),
					Authorization: connect.BasicCredentials(fmt.Sprintf("user-%d", i), "secret"),
				}
				var c net.Conn
				var err error
				var took time.Duration
				for range 10 {
					start := time.Now()
					c, err = d.DialContext(t.Context(), "tcp", "svc.test:443")
					// A check that found no processor for long is refused on a busy machine. One that is
					// not let into the queue is refused at once.
					if took = time.Since(start); err == nil || took < longestQueued {
						break
					}
				}
				if err != nil {
					t.Errorf("client %d: %v", i, err)
					continue
				}
				_ = c.Close()
				t.Logf("client %d logged in after %v", i, took)
				if testnet.Measuring && took > most {
					t.Errorf("client %d waited for %v, want %v at most", i, took, most)
				}
			}
		})
	}
}
