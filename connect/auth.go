package connect

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"unicode"
	"unicode/utf8"

	"culvert.dev/tunnel"
)

// An Authenticator checks the credentials of a Proxy-Authorization field
// (RFC 9110 section 11.7).
//
// Authenticate gets the scheme in lower case and the rest of the field as
// sent. It answers false for a scheme it does not know, and must not take a
// different time for an unknown user than for a wrong password. It must not
// keep or log the credentials.
//
// Challenges returns the value of each Proxy-Authenticate field of a 407, the
// same for every request.
type Authenticator interface {
	Authenticate(ctx context.Context, scheme, credentials string) (tunnel.Peer, bool)
	Challenges() []string
}

const realm = `realm="culvert"`

// BasicAuth checks user names and passwords (RFC 7617).
type BasicAuth struct {
	// Verify reports whether the password is the user's. It has to do the
	// same work for a user that does not exist: see Passwords. Nil refuses
	// everybody.
	Verify func(user, password string) bool
}

// Authenticate implements Authenticator. The Peer's ID is the user name.
func (a *BasicAuth) Authenticate(_ context.Context, scheme, credentials string) (tunnel.Peer, bool) {
	if scheme != "basic" || a.Verify == nil {
		return tunnel.Peer{}, false
	}
	raw, err := base64.StdEncoding.DecodeString(credentials)
	if err != nil || !utf8.Valid(raw) {
		return tunnel.Peer{}, false
	}
	user, password, ok := strings.Cut(string(raw), ":")
	// RFC 7617 section 2 bars control characters, and an ID ends up in logs.
	if !ok || strings.ContainsFunc(string(raw), unicode.IsControl) || !a.Verify(user, password) || user == "" {
		return tunnel.Peer{}, false
	}
	// The clone lets the password go.
	return tunnel.Peer{ID: strings.Clone(user), Method: "basic"}, true
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
func (a *Bearer) Authenticate(_ context.Context, scheme, credentials string) (tunnel.Peer, bool) {
	if scheme != "bearer" || credentials == "" || a.Verify == nil {
		return tunnel.Peer{}, false
	}
	id, ok := a.Verify(credentials)
	if !ok {
		return tunnel.Peer{}, false
	}
	return tunnel.Peer{ID: id, Method: "bearer"}, true
}

// Challenges implements Authenticator.
func (*Bearer) Challenges() []string { return []string{"Bearer " + realm} }

// AnyOf accepts what one of its elements accepts, and offers the challenges
// of all, in order. An empty AnyOf refuses everybody.
type AnyOf []Authenticator

// Authenticate implements Authenticator.
func (a AnyOf) Authenticate(ctx context.Context, scheme, credentials string) (tunnel.Peer, bool) {
	for _, one := range a {
		if p, ok := one.Authenticate(ctx, scheme, credentials); ok {
			return p, true
		}
	}
	return tunnel.Peer{}, false
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
// passwords. It looks at every entry on every call, so its time says neither
// whether a user exists nor how much of a password was right. The passwords
// are kept as SHA-256 digests, which suits generated secrets; for what people
// choose, write a Verify with a slow hash.
func Passwords(users map[string]string) func(user, password string) bool {
	set := make([][sha256.Size]byte, 0, len(users))
	for user, password := range users {
		set = append(set, digest(user, password))
	}
	return func(user, password string) bool {
		d, found := digest(user, password), 0
		for i := range set {
			found |= subtle.ConstantTimeCompare(set[i][:], d[:])
		}
		return found == 1
	}
}

// Tokens returns a Bearer.Verify for a fixed set: whose token is what, by id.
// It compares as Passwords does.
func Tokens(tokens map[string]string) func(token string) (id string, ok bool) {
	type entry struct {
		id     string
		digest [sha256.Size]byte
	}
	set := make([]entry, 0, len(tokens))
	for id, token := range tokens {
		set = append(set, entry{id, digest("", token)})
	}
	return func(token string) (string, bool) {
		d, found := digest("", token), -1
		for i := range set {
			found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(set[i].digest[:], d[:]), i, found)
		}
		if found < 0 {
			return "", false
		}
		return set[found].id, true
	}
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
