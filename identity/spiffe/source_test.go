//go:build !nospiffe

package spiffe

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"culvert.dev/identity"
	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.Main(m) }

const (
	gw    = "spiffe://corp.example/ns/shop/sa/gw"
	other = "spiffe://corp.example/ns/shop/sa/other"
)

// A world is a Source that runs, with its agent.
type world struct {
	t     *testing.T
	ca    *testca.CA
	agent *spiffetest.Agent
	store *identity.Store
	src   *Source
	log   *logged
}

type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newCA(t *testing.T, td string) *testca.CA {
	t.Helper()
	ca, err := testca.New(td, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func start(t *testing.T, answer func(ca *testca.CA) spiffetest.Answer) *world {
	t.Helper()
	ca := newCA(t, "corp.example")
	w := &world{t: t, ca: ca, agent: spiffetest.New(t, answer(ca)), store: new(identity.Store), log: new(logged)}
	w.src = &Source{
		Store: w.store, Socket: w.agent.Socket(), Log: slog.New(slog.NewTextHandler(w.log, nil)),
		firstWait: 5 * time.Millisecond, longest: 20 * time.Millisecond,
	}
	w.src.Configure(Config{
		Keys:  map[string]string{"shop": gw},
		Trust: map[string]string{"corp.example": "corp.example", "partner.example": "partner.example"},
	})
	w.run(w.src)
	return w
}

func (w *world) run(s *Source) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		<-done
	})
}

// answer is that of an agent with a SVID of gw and the bundle of ca.
func answer(t *testing.T) func(ca *testca.CA) spiffetest.Answer {
	return func(ca *testca.CA) spiffetest.Answer {
		return spiffetest.Answer{
			SVIDs:   []*workload.X509SVID{spiffetest.SVID(t, ca, testca.Options{SPIFFEID: gw})},
			Bundles: map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(ca)},
		}
	}
}

// eventually waits until f is true.
func (w *world) eventually(what string, f func() bool) {
	w.t.Helper()
	testnet.Eventually(w.t, time.Minute, f, "%s; %v", what, w)
}

// String says how the agent is, and what was logged.
func (w *world) String() string { return fmt.Sprintf("status %+v, log:\n%s", w.src.Status(), w.log) }

func (w *world) has(serial *big.Int) func() bool {
	return func() bool {
		c, err := w.store.Key("shop").Certificate()
		return err == nil && c.Leaf.SerialNumber.Cmp(serial) == 0
	}
}

func serial(t *testing.T, v *workload.X509SVID) *big.Int {
	t.Helper()
	c, err := x509.ParseCertificate(v.X509Svid)
	if err != nil {
		t.Fatal(err)
	}
	return c.SerialNumber
}

func (w *world) problem(want string) func() bool {
	return func() bool {
		return slices.ContainsFunc(w.src.Status().Streams, func(s Stream) bool { return strings.Contains(s.Problem, want) })
	}
}

func (w *world) well() bool {
	return !slices.ContainsFunc(w.src.Status().Streams, func(s Stream) bool { return s.Problem != "" || s.Updates == 0 })
}

// The agent's SVID and bundles, own and federated, are in the Store, and each change of
// them follows. What has not changed keeps its generation.
func TestFollows(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	partner := newCA(t, "partner.example")
	w := start(t, func(ca *testca.CA) spiffetest.Answer {
		a := answer(t)(ca)
		a.Bundles["spiffe://partner.example"] = spiffetest.Bundle(partner)
		a.JWTBundles = map[string][]byte{"spiffe://corp.example": spiffetest.JWKS(t, "corp.example", map[string]crypto.PublicKey{"k1": key.Public()})}
		return a
	})
	a := answer(t)(w.ca)
	w.eventually("all streams answer", w.well)
	b, err := w.store.Trust("corp.example").Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Roots) != 1 || !b.Roots[0].Equal(w.ca.Root()) || !key.PublicKey.Equal(b.JWTKeys["k1"]) || b.TrustDomain != "corp.example" {
		t.Errorf("bundle: got %+v, want the root of the CA and the JWT key k1", b)
	}
	if b, err = w.store.Trust("partner.example").Bundle(); err != nil || !b.Roots[0].Equal(partner.Root()) {
		t.Errorf("federated bundle: got %v, %v, want the partner's root", b, err)
	}
	if c, err := w.store.Key("shop").Certificate(); err != nil || c.Leaf.URIs[0].String() != gw || c.PrivateKey == nil {
		t.Errorf("key: got %v, %v, want that of %s", c, err, gw)
	}
	st := w.src.Status()
	if len(st.SVIDs) != 1 || st.SVIDs[0].ID != gw || !slices.Equal(st.Bundles, []string{"corp.example", "partner.example"}) {
		t.Errorf("status: got %+v, want one SVID and two bundles", st)
	}

	// The SVID rotates; the partner's bundle goes.
	trust := w.store.Trust("corp.example").Generation()
	a.JWTBundles = map[string][]byte{"spiffe://corp.example": spiffetest.JWKS(t, "corp.example", map[string]crypto.PublicKey{"k1": key.Public()})}
	w.agent.Set(a)
	w.eventually("the new SVID", w.has(serial(t, a.SVIDs[0])))
	w.eventually("the partner is gone", func() bool {
		_, err := w.store.Trust("partner.example").Bundle()
		return err != nil && strings.Contains(err.Error(), "has no bundle of partner.example; it has corp.example")
	})
	if got := w.store.Trust("corp.example").Generation(); got != trust {
		t.Errorf("generation of an unchanged bundle: got %d, want %d", got, trust)
	}

	// A redacted SVID is gone; one of another id is not taken instead.
	a.SVIDs = []*workload.X509SVID{spiffetest.SVID(t, w.ca, testca.Options{SPIFFEID: other})}
	w.agent.Set(a)
	w.eventually("the SVID is gone", func() bool {
		_, err := w.store.Key("shop").Certificate()
		return err != nil && strings.Contains(err.Error(), "no SVID of "+gw+"; it has "+other)
	})
	// Another configuration uses what is known.
	w.src.Configure(Config{Keys: map[string]string{"shop": other, "first": ""}})
	if !w.has(serial(t, a.SVIDs[0]))() {
		t.Error("key of another id after Configure: not that of the agent's SVID")
	}
	if _, err := w.store.Key("first").Certificate(); err != nil {
		t.Errorf("key without an id: got %v, want the agent's default", err)
	}
}

// While the agent is away, or does not know this process, all stays, and the log has a
// line for each change and no more.
func TestAgentAway(t *testing.T) {
	w := start(t, answer(t))
	w.eventually("all streams answer", w.well)
	before, err := w.store.Key("shop").Certificate()
	if err != nil {
		t.Fatal(err)
	}
	w.agent.Stop()
	w.eventually("the agent is away", w.problem("cannot reach the agent"))
	calls := w.agent.Calls()
	if now, err := w.store.Key("shop").Certificate(); now != before || err != nil {
		t.Errorf("key while the agent is away: got %p, %v, want %p", now, err, before)
	}
	w.agent.Set(spiffetest.Answer{Err: status.Error(codes.PermissionDenied, "no identity issued")})
	w.agent.Start()
	w.eventually("the agent does not know the process", w.problem("register it: no identity issued"))
	w.eventually("several attempts", func() bool { return w.agent.Calls() > calls+20 })
	if now, err := w.store.Key("shop").Certificate(); now != before || err != nil {
		t.Errorf("key while it is not registered: got %p, %v, want %p", now, err, before)
	}
	next := answer(t)(w.ca)
	w.agent.Set(next)
	w.eventually("the new SVID", w.has(serial(t, next.SVIDs[0])))
	w.eventually("all streams answer", w.well)
	if n := strings.Count(w.log.String(), "\n"); n > 20 {
		t.Errorf("the log has %d lines after more than 20 attempts of three streams, want one for each change:\n%s", n, w.log)
	}
	if n := strings.Count(w.log.String(), "Workload API answers"); n < 2 {
		t.Errorf("the log says %d times that the agent answers, want 2:\n%s", n, w.log)
	}
}

// What is malformed is refused, and leaves that of its name as it was; the rest of the
// answer is taken.
func TestRefused(t *testing.T) {
	w := start(t, answer(t))
	w.eventually("all streams answer", w.well)
	good := w.src.Status().SVIDs[0]
	svid := func() *workload.X509SVID { return spiffetest.SVID(t, w.ca, testca.Options{SPIFFEID: gw}) }
	foreign, expired := svid(), spiffetest.SVID(t, w.ca, testca.Options{SPIFFEID: gw, NotBefore: time.Now().Add(-2 * time.Hour), TTL: time.Hour})
	foreign.X509SvidKey = svid().X509SvidKey
	named := spiffetest.SVID(t, w.ca, testca.Options{SPIFFEID: other})
	named.SpiffeId = gw
	cut := svid()
	cut.X509Svid = cut.X509Svid[:100]
	authority := svid()
	authority.X509Svid = w.ca.Root().Raw
	bundles := map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(w.ca)}
	for _, c := range []struct {
		name, want string
		answer     spiffetest.Answer
	}{
		{"nothing", "there is no SVID", spiffetest.Answer{}},
		{"key of another", "private key", spiffetest.Answer{SVIDs: []*workload.X509SVID{foreign}, Bundles: bundles}},
		{"expired", "it expired at", spiffetest.Answer{SVIDs: []*workload.X509SVID{expired}, Bundles: bundles}},
		{"certificate of another id", "its certificate is that of " + other, spiffetest.Answer{SVIDs: []*workload.X509SVID{named}, Bundles: bundles}},
		{"half a certificate", "cannot parse", spiffetest.Answer{SVIDs: []*workload.X509SVID{cut}, Bundles: bundles}},
		{"certificate of a CA", "certificate", spiffetest.Answer{SVIDs: []*workload.X509SVID{authority}, Bundles: bundles}},
		{"no bundle", "there is no X.509 bundle", spiffetest.Answer{SVIDs: []*workload.X509SVID{named}}},
		{"empty bundle", "it has no certificate", spiffetest.Answer{Bundles: map[string][]byte{"spiffe://corp.example": nil}}},
		{"half a bundle", "X.509 bundle of corp.example", spiffetest.Answer{Bundles: map[string][]byte{"spiffe://corp.example": w.ca.Root().Raw[:99]}}},
		{"bundle of no trust domain", "X.509 bundle of", spiffetest.Answer{Bundles: map[string][]byte{"spiffe://": spiffetest.Bundle(w.ca)}}},
		{"no JWKS", "JWT bundle of corp.example", spiffetest.Answer{JWTBundles: map[string][]byte{"spiffe://corp.example": []byte("{")}}},
		{"no revocation list", "revocation list", spiffetest.Answer{CRL: [][]byte{{1}}, Bundles: bundles}},
		{"more than 4 MiB", "too large", spiffetest.Answer{Bundles: map[string][]byte{"spiffe://corp.example": make([]byte, 5<<20)}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w.agent.Set(c.answer)
			w.eventually(c.name, w.problem(c.want))
			if got := w.src.Status().SVIDs; len(got) != 1 || got[0] != good {
				t.Errorf("SVIDs: got %v, want the last good one, %v", got, good)
			}
			if b, err := w.store.Trust("corp.example").Bundle(); err != nil || len(b.Roots) != 1 || !b.Roots[0].Equal(w.ca.Root()) {
				t.Errorf("bundle: got %v, %v, want the last good one", b, err)
			}
			w.agent.Set(answer(t)(w.ca))
			w.eventually("all is well again", w.well)
			good = w.src.Status().SVIDs[0]
		})
	}
}

// A good SVID beside a malformed one rotates. A bundle of another domain is not taken
// for the wanted one.
func TestRefusedInPart(t *testing.T) {
	w := start(t, answer(t))
	w.eventually("all streams answer", w.well)
	partner := newCA(t, "partner.example")
	next := spiffetest.SVID(t, w.ca, testca.Options{SPIFFEID: gw})
	w.agent.Set(spiffetest.Answer{
		SVIDs:   []*workload.X509SVID{{SpiffeId: other, X509Svid: []byte("x")}, next},
		Bundles: map[string][]byte{"spiffe://third.example": spiffetest.Bundle(partner), "spiffe://corp.example": []byte("x")},
	})
	w.eventually("the new SVID", w.has(serial(t, next)))
	w.eventually("the bundles", func() bool { return slices.Contains(w.src.Status().Bundles, "third.example") })
	if _, err := w.store.Trust("partner.example").Bundle(); err == nil || !strings.Contains(err.Error(), "has no bundle of partner.example") {
		t.Errorf("bundle of partner.example: got error %v, want that there is none", err)
	}
	if b, err := w.store.Trust("corp.example").Bundle(); err != nil || !b.Roots[0].Equal(w.ca.Root()) {
		t.Errorf("bundle of corp.example: got %v, %v, want the last good one", b, err)
	}
}

// A revocation list goes to the trust domain whose CA signed it, and to no other.
func TestRevocation(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte{1, 2, 3},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	crl, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}, root, key)
	if err != nil {
		t.Fatal(err)
	}
	w := start(t, func(ca *testca.CA) spiffetest.Answer {
		a := answer(t)(ca)
		a.Bundles["spiffe://partner.example"] = der
		a.CRL = [][]byte{crl}
		return a
	})
	w.eventually("all streams answer", w.well)
	for td, want := range map[string]int{"partner.example": 1, "corp.example": 0} {
		if b, err := w.store.Trust(td).Bundle(); err != nil || len(b.Revoked) != want {
			t.Errorf("%s: got %d revocation lists and %v, want %d", td, len(b.Revoked), err, want)
		}
	}
}

// A socket that this process may not use is told apart from one that is not there.
func TestPermissions(t *testing.T) {
	if os.Geteuid() == 0 {
		// Root may use any socket, so its place is taken by a file, which nobody can dial.
		w := &world{t: t, log: new(logged)}
		path := t.TempDir() + "/f"
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		w.src = &Source{Store: new(identity.Store), Socket: "unix://" + path, firstWait: time.Millisecond, longest: time.Millisecond}
		w.run(w.src)
		w.eventually("refused", w.problem("connection refused"))
		return
	}
	w := start(t, answer(t))
	w.eventually("all streams answer", w.well)
	if err := os.Chmod(w.agent.Path(), 0); err != nil {
		t.Fatal(err)
	}
	s := &Source{Store: new(identity.Store), Socket: w.agent.Socket(), firstWait: time.Millisecond, longest: time.Millisecond}
	w.src = s
	w.run(s)
	w.eventually("denied", w.problem("permission denied"))
}

// No handshake fails while the SVID and the CA rotate.
func TestRotationUnderLoad(t *testing.T) {
	w := start(t, answer(t))
	w.eventually("all streams answer", w.well)
	server := &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return w.store.Key("shop").Certificate() },
	}
	addr := testnet.ServeTLS(t, server, func(c *tls.Conn) { _, _ = c.Read(make([]byte, 1)) }).Addr()
	var open sync.RWMutex // held by each handshake
	handshake := func() error {
		open.RLock()
		defer open.RUnlock()
		client := &tls.Config{
			MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, // the id is what counts
			VerifyConnection: func(cs tls.ConnectionState) error {
				b, err := w.store.Trust("corp.example").Bundle()
				if err != nil {
					return err
				}
				roots := x509.NewCertPool()
				for _, r := range b.Roots {
					roots.AddCert(r)
				}
				_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots})
				return err
			},
		}
		c, err := tls.Dial("tcp", addr, client)
		if err != nil {
			return err
		}
		return c.Close()
	}
	stop, failed := make(chan struct{}), make(chan error, 2)
	for range 2 {
		go func() {
			for {
				select {
				case <-stop:
					failed <- nil
					return
				default:
				}
				if err := handshake(); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	for range 5 {
		// As SPIRE does it: the new CA is known before its first SVID, and the old one
		// goes after its last.
		old, next := w.ca, newCA(t, "corp.example")
		a := answer(t)(old)
		a.Bundles["spiffe://corp.example"] = spiffetest.Bundle(old, next)
		w.agent.Set(a)
		w.eventually("the new CA", func() bool {
			b, err := w.store.Trust("corp.example").Bundle()
			return err == nil && slices.ContainsFunc(b.Roots, next.Root().Equal)
		})
		a.SVIDs = answer(t)(next).SVIDs
		w.agent.Set(a)
		w.eventually("the new SVID", w.has(serial(t, a.SVIDs[0])))
		open.Lock() // handshakes with the old one are over
		w.ca = next
		open.Unlock()
	}
	close(stop)
	for range 2 {
		if err := <-failed; err != nil {
			t.Errorf("a handshake failed during rotation: %v", err)
		}
	}
}

// A JWT-SVID is kept for half of its life, and while the agent is away for all of it.
func TestToken(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	now, made := time.Now(), 0
	pass := func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		now = now.Add(d)
	}
	issue := func(id string, audience []string) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		made++
		return spiffetest.Token(t, key, fmt.Sprintf("k%d", made), id, audience, now.Add(time.Hour)), nil
	}
	agent := spiffetest.New(t, spiffetest.Answer{Token: issue})
	s := &Source{Store: new(identity.Store), Socket: agent.Socket()}
	s.now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	get := func() string {
		t.Helper()
		token, err := s.Token(t.Context(), gw, "gw.east.example")
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	first := get()
	pass(29 * time.Minute)
	if got := get(); got != first {
		t.Errorf("after 29 minutes of 60: another token, want the first")
	}
	if other, err := s.Token(t.Context(), gw, "gw.west.example"); err != nil || other == first {
		t.Errorf("for another audience: got the same token, %v, want another", err)
	}
	pass(2 * time.Minute)
	if got := get(); got != first {
		t.Errorf("after 31 minutes of 60: another token at once, want the first while the next is fetched")
	}
	var second string
	testnet.Eventually(t, time.Minute, func() bool { second = get(); return second != first }, "another token after 31 minutes of 60")
	agent.Set(spiffetest.Answer{Err: status.Error(codes.Unavailable, "busy")})
	pass(59 * time.Minute)
	if got := get(); got != second {
		t.Errorf("while the agent is away: another token, want the second")
	}
	pass(2 * time.Minute)
	if _, err := s.Token(t.Context(), gw, "gw.east.example"); err == nil || !strings.Contains(err.Error(), "cannot reach the agent: busy") || strings.Contains(err.Error(), second) {
		t.Errorf("token that has expired: got %v, want an error that names the agent's and has no token", err)
	}
	for want, f := range map[string]func(string, []string) (string, error){
		"not of " + gw: func(_ string, a []string) (string, error) { return issue(other, a) },
		"audience":     func(id string, _ []string) (string, error) { return issue(id, []string{"elsewhere"}) },
		"malformed":    func(string, []string) (string, error) { return "secret.secret.secret", nil },
		"expired": func(id string, a []string) (string, error) {
			return spiffetest.Token(t, key, "k", id, a, now.Add(-time.Second)), nil
		},
		"register it": nil,
	} {
		agent.Set(spiffetest.Answer{Token: f})
		pass(time.Minute)
		if _, err := s.Token(t.Context(), gw, "gw.east.example"); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got error %v, want one with that and without the token", want, err)
		}
	}
	if _, err := s.Token(t.Context(), gw); err == nil {
		t.Error("without an audience: no error")
	}
	agent.Set(spiffetest.Answer{Token: issue})
	for i := range maxTokens + 10 {
		if _, err := s.Token(t.Context(), "", fmt.Sprintf("a%d", i)); err == nil {
			t.Fatal("a token without a subject: no error")
		}
	}
	if n := len(s.tokens.all); n > maxTokens {
		t.Errorf("%d tokens are kept, limit %d", n, maxTokens)
	}
}

// Callers without a token do not wait one after another for an agent that does not answer,
// and one that leaves says nothing of the agent.
func TestTokenOfSilentAgent(t *testing.T) {
	hold, calls := make(chan struct{}), make(chan struct{}, 100)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	agent := spiffetest.New(t, spiffetest.Answer{Token: func(id string, audience []string) (string, error) {
		calls <- struct{}{}
		<-hold
		return "", status.Error(codes.Unavailable, "too late")
	}})
	now := time.Now()
	s := &Source{Store: new(identity.Store), Socket: agent.Socket(), now: func() time.Time { return now }}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := s.Token(ctx, gw, "a")
		left <- err
	}()
	<-calls
	leave()
	if err := <-left; err == nil {
		t.Error("a caller that has left: no error")
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if token, err := s.Token(t.Context(), gw, "a"); err == nil || !strings.Contains(err.Error(), "too late") {
				t.Errorf("got the token %q and %v, want the agent's error", token, err)
			}
		})
	}
	<-calls
	close(hold)
	wg.Wait()
	if n := len(calls); n != 0 {
		t.Errorf("20 callers made %d calls of the agent, want 1", n+1)
	}
	now = now.Add(2 * tokenFailure)
	agent.Set(spiffetest.Answer{Token: func(id string, audience []string) (string, error) {
		return spiffetest.Token(t, key, "k", id, audience, now.Add(time.Hour)), nil
	}})
	if _, err := s.Token(t.Context(), gw, "a"); err != nil {
		t.Errorf("after a while, of an agent that answers: %v", err)
	}
}

// Many callers at half of a token's life make one call of the agent.
func TestTokenOnce(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	made := 0
	agent := spiffetest.New(t, spiffetest.Answer{Token: func(id string, audience []string) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		made++
		return spiffetest.Token(t, key, "k", id, audience, time.Now().Add(time.Hour)), nil
	}})
	s := &Source{Store: new(identity.Store), Socket: agent.Socket()}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := s.Token(t.Context(), gw, "a", "b"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, err := s.Token(t.Context(), gw, "b", "a"); err != nil || made != 1 {
		t.Errorf("got %d calls of the agent and %v, want 1", made, err)
	}
}
