package command

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"runtime"
	"sync"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/connect"
	"culvert.dev/registry/file"
)

// authenticator makes what checks a listener's credentials; nil for none.
func authenticator(a *file.Auth) (connect.Authenticator, error) {
	if a == nil {
		return nil, nil
	}
	var any connect.AnyOf
	if len(a.Users) > 0 {
		verify, err := verifier(a)
		if err != nil {
			return nil, err
		}
		any = append(any, &connect.BasicAuth{Verify: verify})
	}
	if len(a.Tokens) > 0 {
		any = append(any, &connect.Bearer{Verify: tokens(a.Tokens)})
	}
	if len(any) == 0 {
		return nil, errors.New("auth names no user and no token")
	}
	return any, nil
}

// verifier makes what checks the passwords of a listener's users; nil for a
// listener that asks for none.
func verifier(a *file.Auth) (func(user, password string) bool, error) {
	if a == nil {
		return nil, nil
	}
	p, err := newPasswords(a.Users)
	if err != nil {
		return nil, err
	}
	return p.verify, nil
}

// tokens returns a check of bearer tokens. It looks at every one, whatever
// it finds, so that its time says nothing.
func tokens(known map[file.Digest]string) func(string) (string, bool) {
	return func(token string) (string, bool) {
		sum := sha256.Sum256([]byte(token))
		id, ok := "", false
		for digest, name := range known {
			if subtle.ConstantTimeCompare(digest[:], sum[:]) == 1 {
				id, ok = name, true
			}
		}
		return id, ok
	}
}

const (
	remembered  = 4096        // right passwords that need no second bcrypt
	rememberFor = time.Minute // and for how long
)

// passwords checks passwords against bcrypt hashes. A check is slow by
// design, so right ones are remembered for a moment, under a key of this
// process; only a few wrong ones are checked at once, or guessing would take
// the gateway's processors.
type passwords struct {
	users map[string]file.Hash
	decoy []byte // checked for a user there is not, so that the time is the same
	key   []byte
	busy  chan struct{}

	mu    sync.Mutex // guards what follows
	right map[[sha256.Size]byte]time.Time
}

func newPasswords(users map[string]file.Hash) (*passwords, error) {
	p := &passwords{
		users: users,
		key:   make([]byte, 32),
		busy:  make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2)),
		right: make(map[[sha256.Size]byte]time.Time),
	}
	if _, err := rand.Read(p.key); err != nil {
		return nil, err
	}
	cost := bcrypt.MinCost
	for _, h := range users {
		c, err := bcrypt.Cost([]byte(h))
		if err != nil {
			return nil, errors.New("a user's hash is not bcrypt")
		}
		cost = max(cost, c)
	}
	var err error
	p.decoy, err = bcrypt.GenerateFromPassword(p.key, cost)
	return p, err
}

// verify implements connect.BasicAuth.Verify.
func (p *passwords) verify(user, password string) bool {
	mac := hmac.New(sha256.New, p.key)
	mac.Write([]byte(user))
	mac.Write([]byte{0}) // no user name has a NUL: the file's reader sees to it
	mac.Write([]byte(password))
	sum := [sha256.Size]byte(mac.Sum(nil))
	p.mu.Lock()
	until, known := p.right[sum]
	p.mu.Unlock()
	if known && time.Now().Before(until) {
		return true
	}
	hash, exists := p.users[user]
	check := []byte(hash)
	if !exists {
		check = p.decoy
	}
	p.busy <- struct{}{}
	err := bcrypt.CompareHashAndPassword(check, []byte(password))
	<-p.busy
	if err != nil || !exists {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.right) >= remembered {
		clear(p.right)
	}
	p.right[sum] = time.Now().Add(rememberFor)
	return true
}
