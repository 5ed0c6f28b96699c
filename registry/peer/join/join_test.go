package join

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.Main(m) }

// patience is how long a test waits for what must come.
const patience = time.Minute

// A testSite is a Site with a gateway that serves join.culvert.alt by TLS.
type testSite struct {
	*Site
	ca   *testca.CA
	pair *testca.Pair
	addr string
}

func newSite(t testing.TB, name string) *testSite {
	t.Helper()
	ca, err := testca.New(name+".example", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + name + ".example/gw"})
	if err != nil {
		t.Fatal(err)
	}
	s := &testSite{Site: &Site{Store: new(identity.Store), server: invitation.Server{Pause: time.Millisecond}}, ca: ca, pair: pair}
	s.Store.Key("gw").Set(&pair.TLS)
	s.Store.Trust(ca.TrustDomain).Set(&identity.Bundle{TrustDomain: ca.TrustDomain, Roots: []*x509.Certificate{ca.Root()}})
	s.listen(t)
	s.use(t, name, t.TempDir())
	t.Cleanup(s.Close)
	return s
}

func (s *testSite) use(t testing.TB, name, folder string) {
	t.Helper()
	c := &Settings{Name: name, Key: "gw", Trust: s.ca.TrustDomain, State: folder, Gateways: []peer.Gateway{{Address: s.addr, Transports: []string{"connect"}}}}
	if err := s.Use(c); err != nil {
		t.Fatal(err)
	}
}

// listen serves CONNECT to join.culvert.alt inside TLS.
func (s *testSite) listen(t testing.TB) {
	t.Helper()
	ln := testnet.Listen(t)
	s.addr = ln.Addr().String()
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			raw, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer raw.Close()
				c := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{s.pair.TLS}})
				_ = c.SetDeadline(time.Now().Add(patience))
				if c.Handshake() != nil {
					return
				}
				r := bufio.NewReader(c)
				for line := ""; line != "\r\n"; {
					var err error
					if line, err = r.ReadString('\n'); err != nil {
						return
					}
				}
				cs := c.ConnectionState()
				source := netip.MustParseAddrPort(raw.RemoteAddr().String())
				s.ServeTunnel(context.Background(), &tunnel.Request{
					Name: tunnel.MustParseName(Host), Source: netip.AddrPortFrom(spread(source), source.Port()),
					TLS: &tunnel.EndedTLS{Version: cs.Version, Exporter: cs.ExportKeyingMaterial},
					Accept: func() (tunnel.Stream, error) {
						_, err := fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
						return c, err
					},
					Refuse: func(err error) { _, _ = fmt.Fprint(c, "HTTP/1.1 503 no\r\nContent-Length: 0\r\n\r\n") },
				})
			})
		}
	})
}

// spread makes a client of each port, as a client has one attempt at a time.
func spread(a netip.AddrPort) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte(a.Port() >> 8), byte(a.Port())})
}

func join(t testing.TB, s *testSite, token string) (string, error) {
	t.Helper()
	return s.Join(t.Context(), new(net.Dialer), token, []string{"*.inviting.example"})
}

func invite(t testing.TB, s *testSite) string {
	t.Helper()
	token, err := s.Invite([]string{"*.west.example"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// A site whose zone is that of a peer already is refused, and neither side has stored anything.
func TestZoneOfAnotherPeer(t *testing.T) {
	east, west, late := newSite(t, "east"), newSite(t, "west"), newSite(t, "late")
	if _, err := join(t, west, invite(t, east)); err != nil {
		t.Fatal(err)
	}
	token, err := east.Invite([]string{"*.west.example", "*.far.west.example"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the token is not used up
		if _, err := join(t, late, token); err == nil || !strings.Contains(err.Error(), "*.west.example") {
			t.Errorf("a second peer with the zone of the first: %v", err)
		}
	}
	if a, b := len(east.Peers()), len(late.Peers()); a != 1 || b != 0 {
		t.Errorf("the sites have %d and %d peers, want 1 and 0", a, b)
	}
}

// Both sides know each other after one token was used, also after a restart, and forget each
// other by Remove.
func TestJoin(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	token := invite(t, east)
	name, err := join(t, west, token)
	if err != nil || name != "east" {
		t.Fatalf("joined %q, %v", name, err)
	}
	check := func(s *testSite, want, id, zone string, gateways int) {
		t.Helper()
		all := s.Peers()
		if len(all) != 1 || all[0].Name != want || all[0].IDs[0] != id || all[0].Zones[0].String() != zone || len(all[0].Gateways) != gateways || all[0].Access.KeyName != "gw" {
			t.Fatalf("peers are %+v, want %s", all, want)
		}
		b, err := s.Store.Trust(all[0].TrustDomain()).Bundle()
		if err != nil || len(b.Roots) != 1 || b.TrustDomain != want+".example" {
			t.Errorf("the bundle of %s is %+v, %v", want, b, err)
		}
		if members := identity.Members([]*identity.Trust{s.Store.Trust(TrustName)}); len(members) != 1 {
			t.Errorf("%d members of %q, want one", len(members), TrustName)
		}
	}
	// West was told its own address on loopback, which east does not dial on its word.
	check(east, "west", "spiffe://west.example/gw", "*.west.example", 0)
	check(west, "east", "spiffe://east.example/gw", "*.inviting.example", 1)

	info, err := os.Stat(filepath.Join(east.settings.State, "peers.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the state is %v, %v; want mode 0600", info, err)
	}
	data, err := os.ReadFile(filepath.Join(east.settings.State, "peers.json"))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parseToken(token, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secret, _ := json.Marshal(parsed.Secret)
	if strings.Contains(string(data), strings.Trim(string(secret), `"`)) {
		t.Error("the state has the secret")
	}

	folder := east.settings.State
	east.Close()
	again := &testSite{Site: &Site{Store: new(identity.Store)}, ca: east.ca, pair: east.pair, addr: east.addr}
	again.use(t, "east", folder)
	t.Cleanup(again.Close)
	check(again, "west", "spiffe://west.example/gw", "*.west.example", 0)
	if _, err := again.Invite(nil, time.Hour); err == nil {
		t.Error("a site without its key invites")
	}
	if err := again.Remove("west"); err != nil {
		t.Fatal(err)
	}
	if _, err := again.Store.Trust("west.example").Bundle(); err == nil || len(again.Peers()) != 0 {
		t.Errorf("after Remove there are %+v, and the trust is still there: %v", again.Peers(), err)
	}
	if err := again.Remove("west"); err == nil {
		t.Error("a peer is removed twice")
	}
}

// Of many that use one token at once, one joins.
func TestTokenWorksOnce(t *testing.T) {
	east := newSite(t, "east")
	var log lockedBuffer
	east.Log = slog.New(slog.NewTextHandler(&log, nil))
	token := invite(t, east)
	const clients = 100
	sites := make([]*testSite, 4)
	for i := range sites {
		sites[i] = newSite(t, fmt.Sprintf("west%d", i))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	joined := 0
	for i := range clients {
		wg.Go(func() {
			// Refused are those above maxAttempts, too.
			if _, err := join(t, sites[i%len(sites)], token); err == nil {
				mu.Lock()
				joined++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if joined != 1 || len(east.Peers()) != 1 {
		t.Errorf("%d have joined, and there are %d peers; want one", joined, len(east.Peers()))
	}
	if _, err := join(t, newSite(t, "late"), token); err == nil || !strings.Contains(err.Error(), "was used already") {
		t.Errorf("a token that was used: %v", err)
	}
	// The log has the address of the one that has joined, and of others that have tried.
	text := log.String()
	if n := strings.Count(text, `msg="a site has joined"`); n != 1 || !strings.Contains(text, "source=10.0.") {
		t.Errorf("the log has %d joins, want one with an address:\n%s", n, text)
	}
	late := false
	for line := range strings.Lines(text) {
		late = late || strings.Contains(line, `msg="a site could not join"`) && strings.Contains(line, "source=10.0.") && strings.Contains(line, "was used already")
	}
	if !late {
		t.Errorf("the log does not have the address of a client that has used the token again:\n%s", text)
	}
	if secret := strings.TrimSpace(token); strings.Contains(text, secret) {
		t.Error("the log has the token")
	}
}

// A lockedBuffer may be written and read at the same time.
type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// What is wrong with a token is known before a connection is made.
func TestTokensThatAreRefused(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	token := invite(t, east)
	for name, c := range map[string]struct{ token, want string }{
		"none":      {"", "not a token"},
		"other":     {"hello", "not a token"},
		"truncated": {token[:len(token)-3], "damaged"},
		"changed":   {strings.Replace(token, token[40:42], "AA", 1) + "", ""},
		"expired":   {expired(t, token), "and the clock of this machine says 20"},
	} {
		_, err := west.Join(t.Context(), noDialer{t}, c.token, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || len(c.token) > 20 && strings.Contains(err.Error(), c.token[20:]) {
			t.Errorf("%s: %v, want %q and no token in it", name, err, c.want)
		}
		if err := CheckToken(c.token); err == nil {
			t.Errorf("%s: CheckToken finds it good", name)
		}
	}
}

// A token may have been broken into lines, as terminals and mails do.
func TestTokenInLines(t *testing.T) {
	east, west := newSite(t, "inviting"), newSite(t, "west")
	token := invite(t, east)
	broken := "\r\n  " + token[:5] + "\n" + token[5:60] + "\r\n\t" + token[60:] + " \n"
	if err := CheckToken(broken); err != nil {
		t.Errorf("CheckToken: %v", err)
	}
	if _, err := join(t, west, broken); err != nil {
		t.Errorf("Join: %v", err)
	}
}

func expired(t *testing.T, text string) string {
	t.Helper()
	tok, err := parseToken(text, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	tok.Expires = time.Now().Add(-time.Minute)
	out, err := tok.Text()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

type noDialer struct{ t *testing.T }

func (d noDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	d.t.Error("a connection was made")
	return nil, net.ErrClosed
}

// A site that has the other one already, or is of its trust domain, says so before it uses the
// token: the other side has stored nothing, and the token stays valid.
func TestSiteThatIsKnownAlready(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	if _, err := join(t, west, invite(t, east)); err != nil {
		t.Fatal(err)
	}
	if err := east.Remove("west"); err != nil { // and west is not told
		t.Fatal(err)
	}
	token := invite(t, east)
	if _, err := join(t, west, token); err == nil || !strings.Contains(err.Error(), `peer "east" of trust domain "east.example" has joined already: to have it join again, run "culvert peers remove east" at the gateway first`) {
		t.Errorf("joining again: %v", err)
	}
	if all := east.Peers(); len(all) != 0 {
		t.Errorf("the site that was joined has stored %+v", all)
	}
	if err := west.Remove("east"); err != nil {
		t.Fatal(err)
	}
	if _, err := join(t, east, token); err == nil || !strings.Contains(err.Error(), "both sites are of trust domain") {
		t.Errorf("a site that joins itself: %v", err)
	}
	if _, err := join(t, west, token); err != nil {
		t.Errorf("the token works no more: %v", err)
	}
}

// A site that could not store the other one, or may not have a peer with those zones, says so before
// it uses the token: the other side has stored nothing, and the token stays valid.
func TestWhatCannotBeStoredIsFoundOutFirst(t *testing.T) {
	east, west, north := newSite(t, "inviting"), newSite(t, "west"), newSite(t, "north")
	token := invite(t, east)
	wantNothing := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
		if all := east.Peers(); len(all) != 0 {
			t.Errorf("%s: the site that was joined has stored %+v", what, all)
		}
	}
	// Replace writes to a new file first: a folder in its place is in the way, as a full disk is.
	block := filepath.Join(west.settings.State, "peers.json.new")
	if err := os.MkdirAll(filepath.Join(block, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := join(t, west, token)
	wantNothing("a state that can't be written", err, "the token is not used")
	if err := os.RemoveAll(block); err != nil {
		t.Fatal(err)
	}

	if _, err := west.Join(t.Context(), new(net.Dialer), invite(t, north), []string{"*.a.inviting.example"}); err != nil {
		t.Fatal(err)
	}
	_, err = join(t, west, token)
	wantNothing("a zone of another peer", err, `can't get the zone "*.inviting.example": peer "north" has "*.a.inviting.example" already`)
	if err := west.Remove("north"); err != nil {
		t.Fatal(err)
	}
	if _, err := join(t, west, token); err != nil {
		t.Errorf("the token works no more: %v", err)
	}
}

// A gateway with another key is told nothing.
func TestWrongKey(t *testing.T) {
	east, other, west := newSite(t, "east"), newSite(t, "other"), newSite(t, "west")
	tok, err := parseToken(invite(t, east), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	tok.Address = other.addr
	text, err := tok.Text()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := join(t, west, text); err == nil || !strings.Contains(err.Error(), "is not the one in the token") || !strings.Contains(err.Error(), "nothing was sent") {
		t.Errorf("another gateway: %v", err)
	}
	if len(west.Peers()) != 0 {
		t.Errorf("west has peers %+v", west.Peers())
	}
}

// A request that lies is refused, and the token stays valid.
func TestLyingRequests(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	evil := newSite(t, "evil")
	token := invite(t, east)
	tok, err := parseToken(token, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	namesake, err := testca.New("west.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	evilDoc, err := bundle.Marshal(&identity.Bundle{TrustDomain: "west.example", Roots: []*x509.Certificate{namesake.Root()}})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(q *request)
		sign   *testca.Pair
		want   string
	}{
		"another secret":         {func(q *request) { q.Secret = make([]byte, invitation.SecretSize) }, nil, "not known here"},
		"no secret":              {func(q *request) { q.Secret = nil }, nil, "not known here"},
		"zones":                  {func(q *request) { q.Zones = []string{"*.west.example", "*.bank.example"} }, nil, `does not have the zone "*.bank.example"`},
		"a bundle of others":     {func(q *request) { q.Bundle = evilDoc }, nil, "does not verify the joining gateway"},
		"a domain of others":     {func(q *request) { q.Domain = "evil.example" }, nil, ""},
		"our domain":             {func(q *request) { *q = lie(t, east, q) }, east.pair, "both sites are of trust domain"},
		"our name":               {func(q *request) { q.Site = "east" }, nil, "both sites call themselves"},
		"a name that is none":    {func(q *request) { q.Site = "../x" }, nil, "not one label"},
		"the key of another":     {nil, evil.pair, "does not have the key"},
		"a version":              {func(q *request) { q.Version = 9 }, nil, "of version 9"},
		"no certificate":         {func(q *request) { q.Chain = nil }, nil, "malformed"},
		"a malformed one":        {func(q *request) { q.Chain = [][]byte{{1, 2, 3}} }, nil, "malformed"},
		"many gateways":          {func(q *request) { q.Gateways = make([]peer.Gateway, peer.MaxGateways+1) }, nil, "malformed"},
		"a bundle that is empty": {func(q *request) { q.Bundle = json.RawMessage(`{"keys":[]}`) }, nil, "bundle is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			c2, state, err := tok.Dial(t.Context(), new(net.Dialer), Host)
			if err != nil {
				t.Fatal(err)
			}
			defer c2.Close()
			chain, doc, err := west.own(&west.settings)
			if err != nil {
				t.Fatal(err)
			}
			q := request{Version: version, Secret: tok.Secret, Site: "west", Zones: tok.Zones, Bundle: doc, Domain: "west.example", Chain: [][]byte{chain[0].Raw}}
			if c.change != nil {
				c.change(&q)
			}
			line, err := json.Marshal(&q)
			if err != nil {
				t.Fatal(err)
			}
			line = append(line, '\n')
			binding, err := state.ExportKeyingMaterial(exporter, nil, 32)
			if err != nil {
				t.Fatal(err)
			}
			signer := west.pair
			if c.sign != nil {
				signer = c.sign
			}
			var p proof
			if p.Signature, err = sign(signer.TLS.PrivateKey, signed(binding, line)); err != nil {
				t.Fatal(err)
			}
			second, _ := json.Marshal(&p)
			_ = c2.SetDeadline(time.Now().Add(patience))
			if _, err := c2.Write(append(append(line, second...), '\n')); err != nil {
				t.Fatal(err)
			}
			var a answer
			if _, err := invitation.ReadMessage(bufio.NewReader(c2), &a); err != nil {
				t.Fatal(err)
			}
			if a.Error == "" || !strings.Contains(a.Error, c.want) {
				t.Errorf("the answer is %+v, want %q", a, c.want)
			}
		})
	}
	if len(east.Peers()) != 0 {
		t.Errorf("peers are %+v", east.Peers())
	}
	if _, err := join(t, west, token); err != nil {
		t.Errorf("after all that the token does not work: %v", err)
	}
}

// lie is q of a site that is the one that is asked.
func lie(t *testing.T, s *testSite, q *request) request {
	chain, doc, err := s.own(&s.settings)
	if err != nil {
		t.Fatal(err)
	}
	out := *q
	out.Bundle, out.Domain, out.Chain = doc, s.ca.TrustDomain, [][]byte{chain[0].Raw}
	return out
}

// A bundle is taken on a stream that the one before has verified, and kept; one without a CA
// in common is refused on any other.
func TestBundles(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	if _, err := join(t, west, invite(t, east)); err != nil {
		t.Fatal(err)
	}
	c := &east.Peers()[0]
	next, err := testca.New("west.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	doc := func(cas ...*testca.CA) []byte {
		b := &identity.Bundle{TrustDomain: "west.example"}
		for _, ca := range cas {
			b.Roots = append(b.Roots, ca.Root())
		}
		text, err := bundle.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	roots := func() int {
		b, err := east.Store.Trust("west.example").Bundle()
		if err != nil {
			t.Fatal(err)
		}
		return len(b.Roots)
	}
	now := east.TrustGeneration(c)
	if err := east.TakeBundle(c, doc(west.ca, next), now-1); err != nil || roots() != 2 {
		t.Errorf("a bundle that overlaps: %v, %d CAs", err, roots())
	}
	if err := east.TakeBundle(c, doc(next), east.TrustGeneration(c)); err != nil || roots() != 1 {
		t.Errorf("the next one: %v, %d CAs", err, roots())
	}
	if err := east.TakeBundle(c, doc(west.ca), now); err == nil {
		t.Error("a bundle without overlap is taken from a stream that an older one has verified")
	}
	if err := east.TakeBundle(c, []byte("{}"), east.TrustGeneration(c)); err == nil || roots() != 1 {
		t.Errorf("no bundle: %v", err)
	}
	if err := east.TakeBundle(c, doc(west.ca), east.TrustGeneration(c)); err != nil {
		t.Errorf("a bundle without overlap on a stream that the last one has verified: %v", err)
	}
	other := *c
	other.Name = "other"
	if err := east.TakeBundle(&other, doc(next), 0); err != nil || roots() != 1 {
		t.Errorf("the bundle of a peer that has not joined: %v", err)
	}
	var kept state
	data, err := os.ReadFile(filepath.Join(east.settings.State, "peers.json"))
	if err != nil || json.Unmarshal(data, &kept) != nil || string(kept.Peers[0].Bundle) != string(doc(west.ca)) {
		t.Errorf("the state does not have the last bundle: %v", err)
	}
}

// A state that is damaged is not overwritten.
func TestDamagedState(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "peers.json"), []byte(`{"version":1,"peers":[{"na`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &Site{Store: new(identity.Store)}
	defer s.Close()
	if err := s.Use(&Settings{Name: "east", State: folder}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("Use returns %v", err)
	}
	if _, err := s.Invite(nil, time.Hour); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("Invite returns %v", err)
	}
	if err := s.Remove("west"); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("Remove returns %v, which says nothing of why there is no peer", err)
	}
	if err := s.Problem(); err == nil {
		t.Error("the site says that its state can be used")
	}
}

// A state that was damaged is read again when somebody is to join: the gateway need not restart.
func TestDamagedStateIsReadAgain(t *testing.T) {
	east, west := newSite(t, "inviting"), newSite(t, "west")
	if _, err := join(t, west, invite(t, east)); err != nil {
		t.Fatal(err)
	}
	folder := east.settings.State
	path := filepath.Join(folder, "peers.json")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	east.Close()
	write := func(data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	changed := 0
	s := &Site{Store: east.Store, Changed: func() { changed++ }}
	defer s.Close()
	settings := east.settings
	write(nil)
	if err := s.Use(&settings); err == nil || len(s.Peers()) != 0 {
		t.Fatalf("an empty file: %v, and %d peers", err, len(s.Peers()))
	}
	write(good)
	if _, err := s.Invite(nil, time.Hour); err != nil {
		t.Errorf("the file was repaired, and Invite says %v", err)
	}
	if len(s.Peers()) != 1 || changed != 1 || s.Problem() != nil {
		t.Errorf("%d peers, others told %d times, problem %v; want 1, once, none", len(s.Peers()), changed, s.Problem())
	}
}
