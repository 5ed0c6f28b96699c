//go:build !nospiffe

package spiffetest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"culvert.dev/internal/testca"
)

// An Answer is what an Agent answers from now on.
type Answer struct {
	SVIDs      []*workload.X509SVID
	Bundles    map[string][]byte // certificates, DER, by "spiffe://DOMAIN"
	JWTBundles map[string][]byte // JWKS by "spiffe://DOMAIN"
	CRL        [][]byte          // DER
	Err        error             // ends and refuses each call; nil does not

	// Token makes a JWT-SVID. Nil refuses.
	Token func(id string, audience []string) (string, error)
}

// An Agent serves the Workload API at a Unix socket.
type Agent struct {
	workload.UnimplementedSpiffeWorkloadAPIServer
	t    testing.TB
	path string

	mu      sync.Mutex
	answer  Answer
	changed chan struct{}
	server  *grpc.Server
	done    chan struct{}
	calls   int
}

// New starts an Agent, which ends with the test.
func New(t testing.TB, a Answer) *Agent {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	s := &Agent{t: t, path: filepath.Join(dir, "api.sock"), answer: a, changed: make(chan struct{})}
	s.Start()
	t.Cleanup(func() {
		s.Stop()
		_ = os.RemoveAll(dir)
	})
	return s
}

// Socket returns the URI of the socket.
func (s *Agent) Socket() string { return "unix://" + s.path }

// Path returns the path of the socket.
func (s *Agent) Path() string { return s.path }

// Set has the agent answer a, and tells those who listen.
func (s *Agent) Set(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = a
	close(s.changed)
	s.changed = make(chan struct{})
}

// Calls returns how many calls have begun.
func (s *Agent) Calls() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// Start begins to serve, after Stop.
func (s *Agent) Start() {
	s.t.Helper()
	ln, err := net.Listen("unix", s.path)
	if err != nil {
		s.t.Fatal(err)
	}
	server, done := grpc.NewServer(), make(chan struct{})
	workload.RegisterSpiffeWorkloadAPIServer(server, s)
	s.mu.Lock()
	s.server, s.done = server, done
	s.mu.Unlock()
	go func() {
		defer close(done)
		_ = server.Serve(ln)
	}()
}

// Stop ends all calls, and takes the socket away.
func (s *Agent) Stop() {
	s.mu.Lock()
	server, done := s.server, s.done
	s.server = nil
	s.mu.Unlock()
	if server != nil {
		server.Stop()
		<-done
	}
}

func (s *Agent) now() (Answer, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answer, s.changed
}

// each calls send now and after each Set, until the call is over.
func (s *Agent) each(ctx context.Context, send func(Answer) error) error {
	s.mu.Lock()
	s.calls++
	s.mu.Unlock()
	if md, _ := metadata.FromIncomingContext(ctx); !slices.Equal(md.Get("workload.spiffe.io"), []string{"true"}) {
		return status.Error(codes.InvalidArgument, "security header missing from request")
	}
	for {
		a, changed := s.now()
		if a.Err != nil {
			return a.Err
		}
		if err := send(a); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// FetchX509SVID is a call of the Workload API.
func (s *Agent) FetchX509SVID(_ *workload.X509SVIDRequest, out grpc.ServerStreamingServer[workload.X509SVIDResponse]) error {
	return s.each(out.Context(), func(a Answer) error {
		return out.Send(&workload.X509SVIDResponse{Svids: a.SVIDs})
	})
}

// FetchX509Bundles is a call of the Workload API.
func (s *Agent) FetchX509Bundles(_ *workload.X509BundlesRequest, out grpc.ServerStreamingServer[workload.X509BundlesResponse]) error {
	return s.each(out.Context(), func(a Answer) error {
		return out.Send(&workload.X509BundlesResponse{Bundles: a.Bundles, Crl: a.CRL})
	})
}

// FetchJWTBundles is a call of the Workload API.
func (s *Agent) FetchJWTBundles(_ *workload.JWTBundlesRequest, out grpc.ServerStreamingServer[workload.JWTBundlesResponse]) error {
	return s.each(out.Context(), func(a Answer) error {
		return out.Send(&workload.JWTBundlesResponse{Bundles: a.JWTBundles})
	})
}

// FetchJWTSVID is a call of the Workload API.
func (s *Agent) FetchJWTSVID(_ context.Context, r *workload.JWTSVIDRequest) (*workload.JWTSVIDResponse, error) {
	a, _ := s.now()
	if a.Err != nil {
		return nil, a.Err
	}
	if a.Token == nil {
		return nil, status.Error(codes.PermissionDenied, "no identity issued")
	}
	token, err := a.Token(r.SpiffeId, r.Audience)
	if err != nil {
		return nil, err
	}
	return &workload.JWTSVIDResponse{Svids: []*workload.JWTSVID{{SpiffeId: r.SpiffeId, Svid: token}}}, nil
}

// SVID has ca issue an SVID.
func SVID(t testing.TB, ca *testca.CA, o testca.Options) *workload.X509SVID {
	t.Helper()
	pair, err := ca.Issue(o)
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(pair.TLS.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return &workload.X509SVID{SpiffeId: o.SPIFFEID, X509Svid: pair.TLS.Certificate[0], X509SvidKey: key, Bundle: ca.Root().Raw}
}

// Bundle returns the roots of several CAs as the API has them.
func Bundle(cas ...*testca.CA) (der []byte) {
	for _, ca := range cas {
		der = append(der, ca.Root().Raw...)
	}
	return der
}

// JWKS returns a bundle of JWT keys as the API has them.
func JWKS(t testing.TB, trustDomain string, keys map[string]crypto.PublicKey) []byte {
	t.Helper()
	b, err := jwtbundle.FromJWTAuthorities(spiffeid.RequireTrustDomainFromString(trustDomain), keys).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Token signs a JWT-SVID by ES256 with a P-256 key.
func Token(t testing.TB, key *ecdsa.PrivateKey, kid, id string, audience []string, expires time.Time) string {
	t.Helper()
	part := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return base64.RawURLEncoding.EncodeToString(b)
	}
	signed := part(map[string]any{"alg": "ES256", "kid": kid, "typ": "JWT"}) + "." +
		part(map[string]any{"sub": id, "aud": audience, "exp": expires.Unix(), "iat": time.Now().Unix()})
	sum := sha256.Sum256([]byte(signed))
	r, v, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	v.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature)
}
