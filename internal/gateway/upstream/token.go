package upstream

import (
	"context"
	"errors"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A hopToken is the token to show to a gateway, which may be another with each request. It
// is in no table, and no error quotes it. A nil one is none.
type hopToken struct {
	gateway string
	get     func(ctx context.Context) (string, error)
}

// hopToken returns the token that h shows at addr; nil for none, and for one that does not
// change.
func (t *Transports) hopToken(h *registry.Hop, addr string) *hopToken {
	switch {
	case h.JWTSVID != nil:
		want := *h.JWTSVID
		return &hopToken{addr, func(ctx context.Context) (string, error) {
			if t.JWTSVID == nil {
				return "", errors.New("there is no Workload API")
			}
			return t.JWTSVID(ctx, want.ID, want.Audience...)
		}}
	case h.TokenFile != "":
		f := &tokenFile{name: h.TokenFile, readFile: t.ReadFile}
		return &hopToken{addr, func(context.Context) (string, error) { return f.token(time.Now()) }}
	}
	return nil
}

// in returns the Header of a dialer that sends the token in the field with that name. Where
// there is no token, the gateway is not asked, and another may be.
func (t *hopToken) in(field string) func(context.Context, string) (connect.Fields, error) {
	if t == nil {
		return nil
	}
	return func(ctx context.Context, _ string) (connect.Fields, error) {
		token, err := t.get(ctx)
		if err != nil {
			return nil, tunnel.Refusef(tunnel.DialFailed, "there is no token to show to gateway %q: %w", t.gateway, err)
		}
		return connect.Fields{{Name: field, Value: connect.BearerCredentials(token)}}, nil
	}
}

// tokenFileInterval is how long the content of a tokenFile is not looked at again.
const tokenFileInterval = time.Second

// A tokenFile is a file with a token, such as a projected one of Kubernetes, which is
// another every hour. While the file cannot be used, its last token is.
type tokenFile struct {
	name     string
	readFile func(name string) ([]byte, error)

	mu     sync.Mutex // guards what follows
	looked time.Time  // the last time
	last   string     // "" before the first good one
	err    error      // of the last look
}

// token returns the one that the file has now.
func (f *tokenFile) token(now time.Time) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if since := now.Sub(f.looked); f.looked.IsZero() || since >= tokenFileInterval || since < 0 {
		f.looked = now
		f.look()
	}
	if f.last == "" {
		return "", f.err
	}
	return f.last, nil
}

func (f *tokenFile) look() {
	if f.readFile == nil {
		f.err = errors.New("no file can be read")
		return
	}
	content, err := f.readFile(f.name)
	if err != nil {
		f.err = err
		return
	}
	next := registry.ParseToken(content)
	if next == "" {
		f.err = errors.New("the file " + f.name + " does not have one token and nothing else")
		return
	}
	f.last, f.err = next, nil
}
