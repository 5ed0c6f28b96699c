package h3

import (
	"context"
	"crypto/tls"
	"errors"
	"strings"
	"testing"

	"github.com/quic-go/quic-go"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A faultySide panics when it is told of a GOAWAY.
type faultySide struct{ server bool }

func (faultySide) peerGoAway(uint64) *connError { panic("a fault") }
func (s faultySide) isServer() bool             { return s.server }

// TestPanicInAConnection: a panic in a goroutine of a connection ends that one,
// with H3_INTERNAL_ERROR, on either side.
func TestPanicInAConnection(t *testing.T) {
	p := rawProxy(t)
	for _, server := range []bool{true, false} {
		near := rawClient(t, p.addr)
		qc, err := p.ln.Accept(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		far := &raw{t: t, qc: qc}
		c := &conn{qc: near.qc, side: faultySide{server}}
		c.running.Go(c.acceptUni)
		_, _ = far.begin().Write(frameOf(frameGoAway, 0))
		if code := far.ended(); code != InternalError {
			t.Errorf("server %v: the connection ended with %v, want H3_INTERNAL_ERROR", server, code)
		}
		if p, ok := errors.AsType[*tunnel.Panic](c.cause().(*connError).err); !ok || p.Value != "a fault" {
			t.Errorf("server %v: the cause is %v, want the panic", server, c.cause())
		}
		c.running.Wait()
	}
}

// TestPanicInACallback: QUIC calls back in goroutines of its own. A panic there
// ends one handshake, or nothing, and the Server goes on.
func TestPanicInACallback(t *testing.T) {
	echo := tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			return
		}
		b := make([]byte, 100)
		n, _ := s.Read(b)
		_, _ = s.Write(b[:n])
		_ = s.CloseWrite()
		_, _ = s.Read(b)
		_ = s.Close()
	})
	works := func(t *testing.T, addr string) {
		t.Helper()
		d := newDialer(t, addr)
		s := open(t, d, "svc:1")
		testnet.Ping(t, s, "still here")
		_ = s.Close()
	}
	faulty := func(hello *tls.ClientHelloInfo) bool { return hello.ServerName == "faulty.test" }
	for name, break1 := range map[string]func(cfg *tls.Config){
		"choosing a configuration": func(cfg *tls.Config) {
			cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
				if faulty(hello) {
					panic("a fault")
				}
				return nil, nil
			}
		},
		"choosing a certificate": func(cfg *tls.Config) {
			pair := cfg.Certificates[0]
			cfg.Certificates = nil
			cfg.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
				if faulty(hello) {
					panic("a fault")
				}
				return &pair, nil
			}
		},
		"verifying": func(cfg *tls.Config) {
			cfg.VerifyConnection = func(cs tls.ConnectionState) error {
				if cs.ServerName == "faulty.test" {
					panic("a fault")
				}
				return nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := serverTLS().Clone()
			break1(cfg)
			addr := serveHandler(t, &Server{TLS: cfg}, echo)
			bad := clientTLS()
			bad.ServerName, bad.InsecureSkipVerify, bad.NextProtos = "faulty.test", true, []string{"h3"}
			// Where the client's part is over by then, the connection ends.
			qc, err := quic.DialAddr(t.Context(), addr, bad, nil)
			if err == nil {
				<-qc.Context().Done()
				err = context.Cause(qc.Context())
			}
			if te, ok := errors.AsType[*quic.TransportError](err); !ok || !te.Remote {
				t.Errorf("the handshake ended with %v, want the server's own error", err)
			}
			works(t, addr)
		})
	}
	t.Run("verifying, of a dialer", func(t *testing.T) {
		addr := serveHandler(t, &Server{}, echo)
		d := newDialer(t, addr)
		d.TLS.VerifyConnection = func(tls.ConnectionState) error { panic("a fault") }
		if _, err := d.DialContext(t.Context(), "tcp", "svc:1"); err == nil || !strings.Contains(err.Error(), "a fault") {
			t.Errorf("got %v, want the panic", err)
		}
		works(t, addr)
	})
	t.Run("telling of the end", func(t *testing.T) {
		told := make(chan struct{}, 10)
		addr := serveHandler(t, &Server{
			Observe: func(*tunnel.Outcome) {
				select {
				case told <- struct{}{}:
				default:
				}
				panic("a fault")
			},
			Limits: tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1},
		}, echo)
		_ = rawClient(t, addr).qc.CloseWithError(0, "") // without a request
		<-told
		cfg := clientTLS()
		cfg.NextProtos = []string{"h4"} // which ends in the middle of the handshake
		_, _ = quic.DialAddr(t.Context(), addr, cfg, nil)
		<-told
		works(t, addr)
	})
}
