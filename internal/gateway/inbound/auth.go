package inbound

import (
	"container/list"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/connect"
	"culvert.dev/identity/jwt"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// newVerifier returns a verifier that accepts nobody before use.
func newVerifier(b *Builder) (*verifier, error) {
	v := &verifier{checks: b.checks, issued: b.Tokens, right: make(map[[sha256.Size]byte]*list.Element)}
	_, err := rand.Read(v.key[:])
	return v, err
}

// logCredentials logs how the credentials of a listener have changed.
func logCredentials(log *slog.Logger, listener string, change credentialChange) {
	switch {
	case change.on:
		log.Info("the listener now requires credentials", "listener", listener)
	case change.off:
		log.Warn("the listener no longer requires credentials", "listener", listener)
	case change != credentialChange{}:
		log.Info("credentials", "listener", listener,
			"users_added", change.usersAdded, "users_removed", change.usersRemoved, "users_changed", change.usersChanged,
			"tokens_added", change.tokensAdded, "tokens_removed", change.tokensRemoved,
			"issuers_added", change.issuersAdded, "issuers_removed", change.issuersRemoved)
	}
}

const (
	remembered  = 4096        // right passwords that need no second bcrypt
	rememberFor = time.Minute // since they were last used
)

// A verifier checks the credentials of a listener, whatever it speaks. It is a
// connect.Authenticator. What it knows may be changed while it is asked.
//
// The check of a password is slow by design, so right ones are remembered for a
// moment, under a key of this process.
type verifier struct {
	checks *checkQueue
	issued *jwt.Tokens
	gone   func(method, id string) // is told by use of what is not accepted any more; may be nil
	known  atomic.Pointer[credentials]
	key    [32]byte

	mu    sync.Mutex // guards what follows
	right map[[sha256.Size]byte]*list.Element
	order list.List // of rightPassword, the one that was used last in front
}

// A rightPassword is one that a check has found right.
type rightPassword struct {
	sum   [sha256.Size]byte
	hash  registry.Secret // of the user then
	until time.Time
}

// credentials are what a listener accepts.
type credentials struct {
	auth   *registry.Auth
	off    bool // nobody is asked for any
	cost   int  // the highest of any user's hash
	tokens func(string) (string, bool)
	issued *jwt.Authenticator
}

// A credentialChange says how many credentials are other than before.
type credentialChange struct {
	usersAdded, usersRemoved, usersChanged, tokensAdded, tokensRemoved, issuersAdded, issuersRemoved int

	on, off bool // there is an auth, and there was none; or the other way round
}

// use has v accept what is in a and nothing else, from now on; where a is nil,
// credentials are not asked for.
func (v *verifier) use(a *registry.Auth) (change credentialChange, err error) {
	next := &credentials{auth: a, cost: bcrypt.MinCost}
	switch {
	case a == nil:
		a = &registry.Auth{}
		next.auth, next.off = a, true
	case len(a.Users)+len(a.Tokens)+len(a.Issuers) == 0:
		return change, errors.New("auth names no user, no token and no issuer")
	}
	for _, h := range a.Users {
		c, err := bcrypt.Cost([]byte(h))
		if err != nil {
			return change, errors.New("a user's hash is not bcrypt")
		}
		next.cost = max(next.cost, c)
	}
	digests := make(map[[sha256.Size]byte]string, len(a.Tokens))
	for digest, name := range a.Tokens {
		digests[digest] = name
	}
	next.tokens = connect.TokenDigests(digests)
	next.issued = v.issued.Accept(a.Issuers)
	before := v.known.Swap(next)
	switch {
	case before == nil:
		return change, nil
	case before.off != next.off:
		return credentialChange{on: before.off, off: next.off}, nil
	}
	for name, hash := range a.Users {
		switch was, ok := before.auth.Users[name]; {
		case !ok:
			change.usersAdded++
		case was != hash:
			change.usersChanged++
		}
	}
	for name := range before.auth.Users {
		if _, ok := a.Users[name]; !ok {
			change.usersRemoved++
		}
		if a.Users[name] != before.auth.Users[name] {
			v.tell("basic", name)
		}
	}
	for digest, name := range a.Tokens {
		if before.auth.Tokens[digest] != name {
			change.tokensAdded++
		}
	}
	for digest, name := range before.auth.Tokens {
		if a.Tokens[digest] != name {
			change.tokensRemoved++
			v.tell("bearer", name)
		}
	}
	for _, issuer := range before.auth.Issuers {
		if !slices.Contains(a.Issuers, issuer) {
			v.tell("jwt", issuer)
		}
	}
	change.issuersAdded, change.issuersRemoved = missing(before.auth.Issuers, a.Issuers), missing(a.Issuers, before.auth.Issuers)
	return change, nil
}

// A Credential is one that a listener accepts, or all of an issuer: by the method of its
// Peers, and their ID or issuer.
type Credential struct{ Listener, Method, ID string }

// CredentialOf returns that of a client of a listener.
func CredentialOf(listener string, p *tunnel.Peer) Credential {
	if p.Method == "jwt" && p.Auth != nil {
		return Credential{listener, p.Method, p.Auth.Issuer}
	}
	return Credential{listener, p.Method, p.ID}
}

// tell tells of a credential that is not accepted any more.
func (v *verifier) tell(method, id string) {
	if v.gone != nil {
		v.gone(method, id)
	}
}

// missing returns how many of all are not in list.
func missing(list, all []string) (n int) {
	for _, one := range all {
		if !slices.Contains(list, one) {
			n++
		}
	}
	return n
}

// Off reports that no credentials are asked for.
func (v *verifier) Off() bool { return v.known.Load().off }

// Authenticate implements connect.Authenticator.
func (v *verifier) Authenticate(ctx context.Context, c connect.Credentials) (tunnel.Peer, error) {
	known := v.known.Load()
	return connect.AnyOf{&connect.BasicAuth{Verify: v.password}, &connect.Bearer{Verify: known.tokens}, known.issued}.Authenticate(ctx, c)
}

// Challenges implements connect.Authenticator.
func (v *verifier) Challenges() []string {
	var all []string
	auth := v.known.Load().auth
	if len(auth.Users) > 0 {
		all = append(all, new(connect.BasicAuth).Challenges()...)
	}
	if len(auth.Tokens)+len(auth.Issuers) > 0 {
		all = append(all, new(connect.Bearer).Challenges()...)
	}
	return all
}

// password implements connect.BasicAuth.Verify.
func (v *verifier) password(ctx context.Context, from netip.Addr, user, password string) error {
	mac := hmac.New(sha256.New, v.key[:])
	mac.Write([]byte(user))
	mac.Write([]byte{0}) // no user name has a NUL: the source sees to it
	mac.Write([]byte(password))
	sum := [sha256.Size]byte(mac.Sum(nil))
	known := v.known.Load()
	hash, exists := known.auth.Users[user]
	if len(known.auth.Users) == 0 {
		return connect.ErrCredentials
	}
	if exists && v.remembers(sum, hash) {
		return nil
	}
	right := false
	if err := v.checks.run(ctx, from, func() { right = compare(bcrypt.CompareHashAndPassword, hash, password, known.cost) }); err != nil {
		return err
	}
	if !right {
		return connect.ErrCredentials
	}
	if v.known.Load().auth.Users[user] != hash {
		return connect.ErrCredentials // it was taken away meanwhile
	}
	v.remember(sum, hash)
	return nil
}

// HashPassword returns a bcrypt hash of a password of at most 72 bytes, for registry.Auth.
func HashPassword(password string) (string, error) {
	h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.DefaultCost)
	return string(h), err
}

// compare reports whether a password is that of a hash, which is "" for a user
// that does not exist. A wrong one takes the time of a hash of the highest cost,
// whatever the cost of this one is and whether there is one: a check of cost n
// takes 2^n, so that what is missing is one of each cost from n to below the
// highest.
func compare(check func(hash, password []byte) error, hash registry.Secret, password string, highest int) bool {
	if hash == "" {
		_ = check(decoy(highest), []byte(password))
		return false
	}
	if check([]byte(hash), []byte(password)) == nil {
		return true
	}
	cost, _ := bcrypt.Cost([]byte(hash)) // which use has seen
	for ; cost < highest; cost++ {
		_ = check(decoy(cost), []byte(password))
	}
	return false
}

// decoy returns a hash of a cost that no password has, for all that is known.
func decoy(cost int) []byte {
	h := []byte("$2a$00$nOUIs5kJ7naTuTFkBy1veuK0kSxUFXfuaOKdOKf9xYT0KKIGSJwFa")
	h[4], h[5] = byte('0'+cost/10), byte('0'+cost%10)
	return h
}

// remembers reports whether a password was found right a moment ago, for the hash
// that the user has now. It is then remembered for longer.
func (v *verifier) remembers(sum [sha256.Size]byte, hash registry.Secret) bool {
	now := time.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	e := v.right[sum]
	if e == nil {
		return false
	}
	p := e.Value.(*rightPassword)
	if p.hash != hash || now.After(p.until) {
		v.order.Remove(e)
		delete(v.right, sum)
		return false
	}
	p.until = now.Add(rememberFor)
	v.order.MoveToFront(e)
	return true
}

// remember notes a right password, in place of the one that was not used for
// longest where there are too many.
func (v *verifier) remember(sum [sha256.Size]byte, hash registry.Secret) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if e := v.right[sum]; e != nil {
		v.order.Remove(e)
	} else if len(v.right) >= remembered {
		oldest := v.order.Back()
		delete(v.right, v.order.Remove(oldest).(*rightPassword).sum)
	}
	v.right[sum] = v.order.PushFront(&rightPassword{sum, hash, time.Now().Add(rememberFor)})
}
