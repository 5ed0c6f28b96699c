package command

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A flooder is a client that opens sessions and registers names by one carrier.
type flooder interface {
	// register opens a session, and registers names. It returns how often each Reason was given
	// for them: "" for those that are registered. A refusal of the session is an error.
	register(t *testing.T, names []string) (map[string]int, error)

	// connect asks for a service.
	connect(ctx context.Context, addr string) error

	// closeAll ends all sessions.
	closeAll()
}

// A connectFlooder comes by a protocol that has CONNECT or its like.
type connectFlooder struct {
	dialer tunnel.Dialer
	open   []net.Conn
}

func (f *connectFlooder) register(t *testing.T, names []string) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := f.dialer.DialContext(ctx, "tcp", "reverse.culvert.alt:443")
	if err != nil {
		return nil, err
	}
	f.open = append(f.open, c)
	var line strings.Builder
	line.WriteString(`{"version":1,"register":[`)
	for i, n := range names {
		if i > 0 {
			line.WriteByte(',')
		}
		fmt.Fprintf(&line, `{"name":%q}`, n)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, line.String()+"]}\n"); err != nil {
		return nil, err
	}
	answer, err := bufio.NewReader(c).ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("no answer to the first line: %w", err)
	}
	var welcome struct {
		Names []struct{ Reason string }
		Error string
	}
	if err := json.Unmarshal(answer, &welcome); err != nil || welcome.Error != "" {
		return nil, fmt.Errorf("the answer is %v, %q", err, welcome.Error)
	}
	counts := map[string]int{}
	for _, n := range welcome.Names {
		counts[n.Reason]++
	}
	return counts, nil
}

// begin opens a session and says nothing on it.
func (f *connectFlooder) begin(t *testing.T) error {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := f.dialer.DialContext(ctx, "tcp", "reverse.culvert.alt:443")
	if err == nil {
		f.open = append(f.open, c)
	}
	return err
}

func (f *connectFlooder) connect(ctx context.Context, addr string) error {
	c, err := f.dialer.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return err
}

func (f *connectFlooder) closeAll() {
	for _, c := range f.open {
		_ = c.Close()
	}
	f.open = nil
}

// An sshFlooder comes by "ssh -R".
type sshFlooder struct {
	addr string
	key  ssh.Signer
	open []*ssh.Client
}

func (f *sshFlooder) register(t *testing.T, names []string) (map[string]int, error) {
	c, err := ssh.Dial("tcp", f.addr, &ssh.ClientConfig{User: "x", Auth: []ssh.AuthMethod{ssh.PublicKeys(f.key)}, HostKeyCallback: ssh.InsecureIgnoreHostKey(), Timeout: patience})
	if err != nil {
		return nil, err
	}
	f.open = append(f.open, c)
	counts := map[string]int{}
	for _, n := range names {
		ok, _, err := c.SendRequest("tcpip-forward", true, ssh.Marshal(struct {
			Host string
			Port uint32
		}{n, 443}))
		switch {
		case err != nil && len(counts) == 0:
			return nil, err
		case err != nil:
			counts["flood"]++ // the connection has ended; the log has the Reason
			return counts, nil
		case ok:
			counts[""]++
		default:
			counts["overload"]++
		}
	}
	if counts[""] == 0 {
		return counts, errors.New("all names are refused")
	}
	return counts, nil
}

func (f *sshFlooder) connect(_ context.Context, addr string) error {
	c, err := f.open[0].Dial("tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return err
}

func (f *sshFlooder) closeAll() {
	for _, c := range f.open {
		_ = c.Close()
	}
	f.open = nil
}

func newFloodKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// wantRefusal waits until a line of the gateway's log has all of some words.
func (w *reverseWorld) wantRefusal(t *testing.T, words ...string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool {
		for line := range strings.Lines(w.gateway.log.String()) {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
				return true
			}
		}
		return false
	}, "no line of the log has %q", words)
}

// A client that registers thousands of names and opens session after session is refused with
// the documented reasons at the limits of its own account, whatever it comes by; others are
// served all the while, and what it has held is free when it leaves.
func TestRegisterFloods(t *testing.T) {
	const mostSessions = 8
	w := newReverseWorld(t)
	plain := w.gateway.addrs[0]
	key := newFloodKey(t)
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(newFloodKey(t), "")
	if err != nil {
		t.Fatal(err)
	}
	recipe := w.gatewayRecipe
	for _, change := range [][2]string{
		{"identity:\n", "  - {address: \"127.0.0.1:2\", protocols: [ssh], ssh: {hostKeyFile: host.key, authorizedKeysFile: authorized_keys}}\nidentity:\n"},
		{"protocols: [connect]", "protocols: [connect, connect-h2, websocket]"},
		{`"spiffe://corp.example/ns/edge/*"]}`, `"spiffe://corp.example/ns/edge/*"]}, {users: [mallory]}`},
		{`":443"`, `"127.0.0.1:1"`},
	} {
		if !strings.Contains(recipe, change[0]) {
			t.Fatalf("the guide's gateway has no %q", change[0])
		}
		recipe = strings.Replace(recipe, change[0], change[1], 1)
	}
	gw := w.issue(t, "spiffe://corp.example/ns/gw/sa/gw1", "gw1.example")
	w.gateway = startFile(t, map[string]string{
		"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "ca.pem": string(w.ca.CertPEM),
		"authorized_keys": strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))) + " mallory\n",
		"host.key":        string(pem.EncodeToMemory(block)),
		"culvert.yaml":    fmt.Sprintf("cluster: gw\nlimits: {maxConnectionsPerPrincipal: %d}\n", mostSessions) + recipe,
	})
	addr := w.gateway.addrs[0]
	w.connector(t, "spiffe://corp.example/ns/edge/sa/good", strings.Replace(w.recipe, plain, addr, 1))
	const want = "hello spiffe://corp.example/ns/web/sa/client\n"
	testnet.Eventually(t, patience, func() bool {
		got, err := w.ask(t, "cam.edge.example")
		return err == nil && got == want
	}, "the service answers")

	over := func(id string, make func(*tls.Config) tunnel.Dialer) flooder {
		pair := w.issue(t, id)
		return &connectFlooder{dialer: make(&tls.Config{ServerName: "gw1.example", RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{pair.TLS}})}
	}
	for _, c := range []struct {
		carrier string
		client  func(id string) flooder
	}{
		{"ssh", func(string) flooder { return &sshFlooder{addr: w.gateway.addrs[1], key: signer} }},
		{"connect", func(id string) flooder {
			return over(id, func(c *tls.Config) tunnel.Dialer { return &connect.Dialer{Proxy: addr, TLS: c} })
		}},
		{"connect-h2", func(id string) flooder {
			return over(id, func(c *tls.Config) tunnel.Dialer {
				d := &h2.Dialer{Proxy: addr, TLS: c}
				t.Cleanup(func() { _ = d.Close() })
				return d
			})
		}},
		{"websocket", func(id string) flooder {
			return over(id, func(c *tls.Config) tunnel.Dialer { return &ws.Dialer{URL: "wss://" + addr, TLS: c} })
		}},
	} {
		carrier := c.carrier
		t.Run(carrier, func(t *testing.T) {
			f := c.client("spiffe://corp.example/ns/edge/sa/" + carrier)
			defer f.closeAll()

			// Another client asks for the service all the while.
			var served, failed atomic.Int64
			stop, asked := context.WithCancel(t.Context())
			done := make(chan struct{})
			defer func() { asked(); <-done }()
			go func() {
				defer close(done)
				for stop.Err() == nil {
					if got, err := w.ask(t, "cam.edge.example"); err == nil && got == want {
						served.Add(1)
					} else if stop.Err() == nil {
						failed.Add(1)
						t.Logf("the service says %q, %v", got, err)
					}
				}
			}()

			names := func(from, n int) (all []string) {
				for i := range n {
					all = append(all, fmt.Sprintf("n%d.%s.edge.example", from+i, carrier))
				}
				return all
			}
			counts, err := f.register(t, names(0, 1200))
			if err != nil || counts[""] != 1000 || counts["overload"] == 0 || counts["overload"]+counts["flood"] > 200 {
				t.Errorf("of 1200 names %v, %v; want 1000 registered, and the others refused", counts, err)
			}
			sessions, refusal := 2, error(nil)
			if counts["flood"] > 0 {
				sessions = 1 // it has ended
			}
			// Another session has room for names of its own, but its owner has not.
			more, err := f.register(t, names(5000, 1))
			if more["overload"] != 1 || err != nil && carrier != "ssh" {
				t.Errorf("a name by another session of the owner: %v, %v; want it refused", more, err)
			}
			for refusal == nil && sessions < 10*mostSessions {
				if _, refusal = f.register(t, names(0, 1)); refusal == nil {
					sessions++
				}
			}
			if sessions != mostSessions || refusal == nil {
				t.Errorf("%d sessions are open, want %d: %v", sessions, mostSessions, refusal)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := f.connect(ctx, "cam.edge.example:443"); err == nil {
				t.Error("the sessions do not count beside the tunnels of the client")
			}
			if carrier == "ssh" { // the log of the first refusals has all of them
				w.wantRefusal(t, "proto=ssh", "reason=overload", "target=n1000.ssh.edge.example:443")
				if counts["flood"] > 0 {
					w.wantRefusal(t, "proto=ssh", "reason=flood")
				}
			}
			if carrier != "ssh" && tunnel.ReasonOf(refusal) != tunnel.Overload {
				t.Errorf("the reason is %q", tunnel.ReasonOf(refusal))
			}
			testnet.Eventually(t, patience, func() bool { return served.Load() > 0 }, "another client is served")
			if n := failed.Load(); n > 0 {
				t.Errorf("another client was served %d times, and %d times not", served.Load(), n)
			}

			f.closeAll()
			testnet.Eventually(t, patience, func() bool {
				_, err := f.register(t, names(0, 1))
				return err == nil
			}, "there is room again")

			half, ok := f.(*connectFlooder)
			if !ok {
				return // a session of ssh is there once the client has logged in
			}
			f.closeAll()
			testnet.Eventually(t, patience, func() bool {
				for len(half.open) < mostSessions {
					if half.begin(t) != nil {
						half.closeAll()
						return false
					}
				}
				return true
			}, "as many sessions that say nothing stand")
			if _, err := f.register(t, names(0, 1)); tunnel.ReasonOf(err) != tunnel.Overload {
				t.Errorf("beside sessions that say nothing a further one gets %v, want overload: they do not count", err)
			}
		})
	}
}
