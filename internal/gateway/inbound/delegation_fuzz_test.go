package inbound

import (
	"crypto"
	"crypto/x509"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/tunnel"
)

// A told is an assertion, with all that decides whether it holds.
type told struct {
	token   string
	by      string // the gateway that has signed, and says so
	session int    // that it is bound to
	service string // the audience
	subject string
	domain  string
	until   time.Duration // after the beginning
}

// FuzzDelegations has gateways send assertions in any order over several sessions: good
// ones, those of other sessions, gateways and audiences, expired ones, cut and altered ones,
// while time goes on and the delegates change. By a model of their own: nobody is believed
// but whom a good one names.
func FuzzDelegations(f *testing.F) {
	const own, listed, other = "spiffe://corp.example/inner", "spiffe://corp.example/gw", "spiffe://corp.example/other"
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		f.Fatal(err)
	}
	pairs := map[string]*testca.Pair{}
	for _, id := range []string{own, listed, other} {
		if pairs[id], err = ca.Issue(testca.Options{SPIFFEID: id}); err != nil {
			f.Fatal(err)
		}
	}
	// Sessions 0 and 1 are of the listed gateway, 2 is of the other one.
	gatewayOf := []string{listed, listed, other}
	binding := func(session int) []byte { return []byte(strings.Repeat(string(rune('a'+session)), 32)) }
	began := time.Now().Truncate(time.Second)
	var all []told
	for _, by := range []string{listed, other} {
		for session := range gatewayOf {
			for _, audience := range []string{own, "spiffe://corp.example/third"} {
				for _, subject := range []string{"spiffe://corp.example/a", "spiffe://partner.example/b", "alice", "uid:0"} {
					for _, until := range []time.Duration{20 * time.Second, time.Minute} {
						s, err := delegation.NewSigner(by, pairs[by].TLS.PrivateKey.(crypto.Signer), nil)
						if err != nil {
							f.Fatal(err)
						}
						token, err := s.Sign(&delegation.Assertion{Subject: subject, Method: "mtls", Audience: audience, Binding: binding(session), IssuedAt: began, Expires: began.Add(until)})
						if err != nil {
							f.Fatal(err)
						}
						domain := ""
						if rest, ok := strings.CutPrefix(subject, "spiffe://"); ok {
							domain, _, _ = strings.Cut(rest, "/")
						}
						all = append(all, told{token, by, session, audience, subject, domain, until})
					}
				}
			}
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, ops []byte) {
		store, now := new(identity.Store), began
		d := &delegates{store: store}
		d.verifier.Time = func() time.Time { return now }
		delegatesOf := map[string][]string{"corp.example": {listed}, "partner.example": {listed}}
		store.SetDelegates(delegatesOf)
		var before []tunnel.Peer // that were believed
		for len(ops) >= 4 {
			op, session, pick, arg := ops[0], int(ops[1])%len(gatewayOf), int(ops[2]), int(ops[3])
			ops = ops[4:]
			gateway := gatewayOf[session]
			a := all[pick%len(all)]
			stated, good := []string{a.token}, true
			switch op % 8 {
			case 0: // time goes on
				now = now.Add(time.Duration(arg) * time.Second / 8)
				continue
			case 1: // the delegates change
				delegatesOf = map[string][]string{}
				for i, domain := range []string{"corp.example", "partner.example"} {
					for j, id := range []string{listed, other} {
						if arg>>(2*i+j)&1 == 1 {
							delegatesOf[domain] = append(delegatesOf[domain], id)
						}
					}
				}
				store.SetDelegates(delegatesOf)
				for _, p := range before {
					domain := p.Auth.TrustDomain
					if domain == "" {
						domain = "corp.example"
					}
					if holds := slices.Contains(delegatesOf[domain], p.Auth.Actor.ID); holds != (p.Revoked() == nil) {
						t.Fatalf("%s by %s is revoked: %v, and the delegates are %v", p.ID, p.Auth.Actor.ID, p.Revoked(), delegatesOf)
					}
				}
				continue
			case 2:
				stated, good = append(stated, all[arg%len(all)].token), false
			case 3:
				stated[0], good = a.token[:(pick*256+arg)%len(a.token)], false
			case 4:
				at := (pick*256 + arg) % len(a.token)
				altered := "A"
				if a.token[at] == 'A' {
					altered = "B"
				}
				stated[0], good = a.token[:at]+altered+a.token[at+1:], false
			case 5:
				// The head of one and the signature of another.
				b := all[arg%len(all)].token
				stated[0] = a.token[:strings.LastIndex(a.token, ".")] + b[strings.LastIndex(b, "."):]
				good = stated[0] == a.token
			}
			auth, err := identity.Principal(gateway)
			if err != nil {
				t.Fatal(err)
			}
			peer := tunnel.Peer{ID: gateway, Method: "mtls", Auth: auth}
			got, err := d.peer(&tunnel.Request{Peer: peer, TLS: &tunnel.EndedTLS{
				Peer: peer, Chain: []*x509.Certificate{pairs[gateway].TLS.Leaf}, Certificate: pairs[own].TLS.Leaf,
				Exporter: func(string, []byte, int) ([]byte, error) { return binding(session), nil },
			}}, connect.Stated{Callers: stated})
			domain := a.domain
			if domain == "" {
				domain = "corp.example"
			}
			isListed := slices.Contains(delegatesOf["corp.example"], gateway) || slices.Contains(delegatesOf["partner.example"], gateway)
			good = good && a.by == gateway && a.session == session && a.service == own && now.Add(-5*time.Second).Before(began.Add(a.until)) && slices.Contains(delegatesOf[domain], gateway)
			switch {
			case !isListed:
				if err != nil || got.ID != gateway || got.Method != "mtls" || got.Auth.Actor != nil {
					t.Fatalf("a gateway that is not listed: got %+v, %v, want the gateway", got, err)
				}
			case !good:
				if err == nil {
					t.Fatalf("%+v in session %d, at %v, with the delegates %v: got %+v, want it refused", a, session, now.Sub(began), delegatesOf, got)
				}
			case err != nil || got.ID != a.subject || got.Auth.TrustDomain != a.domain || got.Auth.Actor == nil || got.Auth.Actor.ID != gateway || got.Revoked() != nil:
				t.Fatalf("%+v in session %d, at %v, with the delegates %v: got %+v, %v", a, session, now.Sub(began), delegatesOf, got, err)
			case a.subject == "uid:0" && got.Method != delegated:
				t.Fatalf("a user of another machine has the method %q", got.Method)
			default:
				before = append(before, got)
			}
		}
	})
}
