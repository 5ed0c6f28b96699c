package connect

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"

	"culvert.dev/tunnel"
)

// An Authenticator checks the credentials of a request: those of its
// Proxy-Authorization field (RFC 9110 section 11.7), or another field that a load
// balancer has signed.
//
// Authenticate returns an error that wraps ErrCredentials for what it does not accept,
// whose text is for the log alone, and a *tunnel.Error where it has not looked: of
// Overload, where it has too much to do. It must not take a different time for an
// unknown user than for a wrong password, and must not keep or log the credentials. It
// ends when ctx does. The Peer has no Actor: whoever calls adds the one of c.TLS.
//
// Challenges returns the value of each Proxy-Authenticate field of a 407, the
// same for every request.
//
// One that also has Off, which reports that no credentials are asked for at this
// moment, counts for nothing while that is true.
type Authenticator interface {
	Authenticate(ctx context.Context, c Credentials) (tunnel.Peer, error)
	Challenges() []string
}

// Asks reports whether a, which may be nil, asks for credentials at this moment.
func Asks(a Authenticator) bool {
	if off, ok := a.(interface{ Off() bool }); ok && off.Off() {
		return false
	}
	return a != nil
}

// Credentials are what a client shows. All of it belongs to the request and must not be
// kept.
type Credentials struct {
	Scheme    string           // in lower case; "" where the field is missing
	Value     string           // the rest of the field, as sent
	From      netip.Addr       // the client's address
	Authority Authority        // what is asked for; zero where that cannot be parsed
	Fields    Fields           // of the request; nil for a protocol without
	TLS       *tunnel.EndedTLS // the session that the request came by; nil for none
}

// ErrCredentials is the refusal of credentials that are wrong. A server's error wraps it.
var ErrCredentials = errors.New("the credentials are not accepted")

// Authenticate has a judge credentials for req, whose field was sent n times with the
// value sent, and records in req the identity of the client. What a client certificate
// names stays beside it, as the Actor. It does nothing where a asks for none. It fills in
// the Scheme, Value, From and TLS of c. Its errors are *tunnel.Error.
func Authenticate(ctx context.Context, a Authenticator, req *tunnel.Request, sent string, n int, c Credentials) error {
	if !Asks(a) {
		return nil
	}
	scheme, value, _ := strings.Cut(sent, " ")
	c.Scheme, c.Value = strings.ToLower(scheme), strings.TrimLeft(value, " ")
	c.From, c.TLS = req.Source.Addr(), req.TLS
	peer, err := a.Authenticate(ctx, c)
	switch refused := (*tunnel.Error)(nil); {
	case err == nil:
		req.Peer = peer.WithActor(req.Peer)
		return nil
	case errors.As(err, &refused):
		return err
	case n == 0 && err == ErrCredentials:
		return tunnel.Refusef(tunnel.NoAuth, "no credentials")
	}
	return &tunnel.Error{Reason: tunnel.NoAuth, Err: err}
}

const realm = `realm="culvert"`

// BasicAuth checks user names and passwords (RFC 7617).
type BasicAuth struct {
	// Verify returns nil if the password is that of the user, and an error of
	// Authenticate if not. It has to do the same work for a user that does not
	// exist: see Passwords. A nil Verify refuses everybody.
	Verify func(ctx context.Context, from netip.Addr, user, password string) error
}

// Authenticate implements Authenticator. The Peer's ID is the user name.
func (a *BasicAuth) Authenticate(ctx context.Context, c Credentials) (tunnel.Peer, error) {
	if c.Scheme != "basic" || a.Verify == nil {
		return tunnel.Peer{}, ErrCredentials
	}
	raw, err := base64.StdEncoding.DecodeString(c.Value)
	if err != nil || !utf8.Valid(raw) {
		return tunnel.Peer{}, ErrCredentials
	}
	user, password, ok := strings.Cut(string(raw), ":")
	// RFC 7617 section 2 bars control characters, and an ID ends up in logs.
	if !ok || user == "" || strings.ContainsFunc(string(raw), unicode.IsControl) {
		return tunnel.Peer{}, ErrCredentials
	}
	if err := a.Verify(ctx, c.From, user, password); err != nil {
		return tunnel.Peer{}, err
	}
	// The clone lets the password go.
	return tunnel.Peer{ID: strings.Clone(user), Method: "basic"}, nil
}

// Challenges implements Authenticator.
func (*BasicAuth) Challenges() []string { return []string{"Basic " + realm + `, charset="UTF-8"`} }

// Bearer checks tokens (RFC 6750).
type Bearer struct {
	// Verify reports whether the token is good, and whose it is. Nil refuses
	// everybody. See Tokens.
	Verify func(token string) (id string, ok bool)
}

// Authenticate implements Authenticator. The Peer's ID is what Verify said.
func (a *Bearer) Authenticate(_ context.Context, c Credentials) (tunnel.Peer, error) {
	if c.Scheme != "bearer" || c.Value == "" || a.Verify == nil {
		return tunnel.Peer{}, ErrCredentials
	}
	id, ok := a.Verify(c.Value)
	if !ok {
		return tunnel.Peer{}, ErrCredentials
	}
	return tunnel.Peer{ID: id, Method: "bearer"}, nil
}

// Challenges implements Authenticator.
func (*Bearer) Challenges() []string { return []string{"Bearer " + realm} }

// AnyOf accepts what one of its elements accepts, and offers the challenges
// of all, in order. An empty AnyOf refuses everybody.
type AnyOf []Authenticator

// Authenticate implements Authenticator.
func (a AnyOf) Authenticate(ctx context.Context, c Credentials) (tunnel.Peer, error) {
	refused := ErrCredentials
	for _, one := range a {
		p, err := one.Authenticate(ctx, c)
		if err == nil {
			return p, nil
		}
		if err != ErrCredentials {
			refused = err // it says more, or has not looked
		}
	}
	return tunnel.Peer{}, refused
}

// Challenges implements Authenticator.
func (a AnyOf) Challenges() []string {
	var all []string
	for _, one := range a {
		all = append(all, one.Challenges()...)
	}
	return all
}

// Passwords returns a BasicAuth.Verify for a fixed set of users and their
// passwords. It looks at every entry on every call, so its time reveals neither
// whether a user exists nor how much of a password was right. The passwords
// are kept as SHA-256 digests, which suits generated secrets; for what people
// choose, write a Verify with a slow hash.
func Passwords(users map[string]string) func(ctx context.Context, from netip.Addr, user, password string) error {
	set := make([][sha256.Size]byte, 0, len(users))
	for user, password := range users {
		set = append(set, digest(user, password))
	}
	return func(_ context.Context, _ netip.Addr, user, password string) error {
		d := digest(user, password)
		if find(set, &d) < 0 {
			return ErrCredentials
		}
		return nil
	}
}

// Tokens returns a Bearer.Verify for a fixed set: whose token is what, by id.
// It compares as Passwords does.
func Tokens(tokens map[string]string) func(token string) (id string, ok bool) {
	digests := make(map[[sha256.Size]byte]string, len(tokens))
	for id, token := range tokens {
		digests[sha256.Sum256([]byte(token))] = id
	}
	return TokenDigests(digests)
}

// TokenDigests is Tokens for tokens of which only the SHA-256 is known: ids by
// digest.
func TokenDigests(digests map[[sha256.Size]byte]string) func(token string) (id string, ok bool) {
	set, ids := make([][sha256.Size]byte, 0, len(digests)), make([]string, 0, len(digests))
	for digest, id := range digests {
		set, ids = append(set, digest), append(ids, id)
	}
	return func(token string) (string, bool) {
		d := sha256.Sum256([]byte(token))
		i := find(set, &d)
		if i < 0 {
			return "", false
		}
		return ids[i], true
	}
}

// find returns where d is in set, -1 if nowhere. It looks at every element, and
// at all bytes of each, whatever it finds: its time says nothing of either.
func find(set [][sha256.Size]byte, d *[sha256.Size]byte) int {
	found := -1
	for i := range set {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(set[i][:], d[:]), i, found)
	}
	return found
}

// digest is one value for a pair; the length in front keeps ("a", "b:c")
// apart from ("a:b", "c").
func digest(user, secret string) [sha256.Size]byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(len(user)))
	return sha256.Sum256(append(append(b, user...), secret...))
}

// BasicCredentials returns a Dialer.Authorization of a user and a password.
// The user name has no colon.
func BasicCredentials(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// BearerCredentials returns a Dialer.Authorization of a token.
func BearerCredentials(token string) string { return "Bearer " + token }
