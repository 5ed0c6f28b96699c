package replicas

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testca"
)

// answerTime is far more than an answer takes on a busy machine.
const answerTime = 20 * time.Second

// Clients make connections through a balancer, each with a handshake in which
// both sides show a certificate, and a request.
type clients struct {
	to  *balancer
	tls *tls.Config

	mu     sync.Mutex // guards the following
	made   map[netip.Addr]int
	failed []failure
}

// A failure is a connection that was not served.
type failure struct {
	began time.Time
	pod   netip.Addr
	err   error
}

func newClients(t *testing.T, ca *testca.CA, to *balancer, name string) *clients {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://replicas.test/ns/shop/sa/client", Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	cfg := pair.ClientConfig(name)
	cfg.MinVersion = tls.VersionTLS13
	return &clients{to: to, made: map[netip.Addr]int{}, tls: cfg}
}

// connect makes a connection for a name.
func (c *clients) connect(ctx context.Context, name string) (*tls.Conn, netip.Addr, error) {
	raw, pod, err := c.to.dial(ctx)
	if err != nil {
		return nil, pod, err
	}
	conn, err := c.shake(ctx, raw, name)
	return conn, pod, err
}

func (c *clients) shake(ctx context.Context, raw net.Conn, name string) (*tls.Conn, error) {
	cfg := c.tls.Clone()
	cfg.ServerName = name
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

// ask makes a request on a connection.
func ask(conn *tls.Conn, r *bufio.Reader) error {
	if err := conn.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	name := conn.ConnectionState().ServerName
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", name); err != nil {
		return err
	}
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("answered with %s", resp.Status)
	}
	return nil
}

// once makes a connection and one request on it.
func (c *clients) once(ctx context.Context, name string) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	conn, pod, err := c.connect(ctx, name)
	if err != nil {
		return pod, err
	}
	defer conn.Close()
	return pod, ask(conn, bufio.NewReader(conn))
}

// load makes connections, one after the other by each of n clients, until the
// test ends.
func (c *clients) load(t *testing.T, n int) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	for range n {
		running.Go(func() {
			for ctx.Err() == nil {
				began := time.Now()
				pod, err := c.once(ctx, c.tls.ServerName)
				if ctx.Err() != nil {
					return
				}
				c.mu.Lock()
				if err != nil {
					c.failed = append(c.failed, failure{began, pod, err})
				} else {
					c.made[pod]++
				}
				c.mu.Unlock()
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
}

// take returns how many connections were served by each pod, and those that
// failed, since it was last called.
func (c *clients) take() (map[netip.Addr]int, []failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	made, failed := c.made, c.failed
	c.made, c.failed = map[netip.Addr]int{}, nil
	return made, failed
}

// A tunnel is a connection that is in use for as long as it stands.
type tunnel struct {
	pod   netip.Addr
	conn  *tls.Conn
	ended chan struct{} // closed when it has failed
	at    time.Time     // when; after ended
	err   error
}

// tunnels opens n that are in use until they fail or the test ends.
func (c *clients) tunnels(t *testing.T, n int) []*tunnel {
	t.Helper()
	var all []*tunnel
	for range n {
		conn, pod, err := c.connect(t.Context(), c.tls.ServerName)
		if err != nil {
			t.Fatalf("a long tunnel by pod %s: %v", pod, err)
		}
		u := &tunnel{pod: pod, conn: conn, ended: make(chan struct{})}
		all = append(all, u)
		go func() {
			defer close(u.ended)
			r := bufio.NewReader(conn)
			for {
				if u.err = ask(conn, r); u.err != nil {
					u.at = time.Now()
					return
				}
				time.Sleep(250 * time.Millisecond)
			}
		}()
		t.Cleanup(func() {
			conn.Close()
			<-u.ended
		})
	}
	return all
}

// stands reports whether u has not failed.
func (u *tunnel) stands() bool {
	select {
	case <-u.ended:
		return false
	default:
		return true
	}
}
