package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

const (
	passwordTimeout = 10 * time.Second // of a command that writes one
	maxPassword     = 1024             // bytes

	// A proxy that counts wrong passwords closes the account after a few: one that was
	// refused is sent again after these, doubled each time.
	minPasswordRetry = 30 * time.Second
	maxPasswordRetry = 15 * time.Minute
)

// passwords keeps the password of a Proxy until it is refused.
type passwords struct {
	read func(context.Context) (string, error)
	runs *probes

	mu      sync.Mutex // guards what follows
	last    string
	known   bool          // there is a last one
	refused bool          // last was
	err     error         // of the last run; or that its password had been refused
	retryAt time.Time     // after err
	wait    time.Duration // from the next err to its retryAt
	running chan struct{} // is closed at the end of a run; nil for none
}

func newPasswords(read func(context.Context) (string, error)) *passwords {
	return &passwords{read: read, runs: newProbes(), wait: minPasswordRetry}
}

// get returns the password. The ctx ends the waiting for what reads it, and not the reading.
func (p *passwords) get(ctx context.Context) (string, error) {
	for {
		p.mu.Lock()
		if p.known && !p.refused {
			defer p.mu.Unlock()
			return p.last, nil
		}
		if p.err != nil && time.Now().Before(p.retryAt) {
			defer p.mu.Unlock()
			return "", p.err
		}
		running := p.running
		if running == nil {
			running = make(chan struct{})
			if !p.start(running) {
				p.mu.Unlock()
				return "", errors.New("the settings of the proxy have changed")
			}
			p.running = running
		}
		p.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// start reads the password in a goroutine that closes ended. It is false after Close.
func (p *passwords) start(ended chan struct{}) bool {
	password := ""
	return p.runs.run(func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeout(ctx, passwordTimeout)
		defer cancel()
		password, err = p.read(ctx)
		return err
	}, func(err error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		defer close(ended)
		p.running = nil
		if err == nil && p.refused && p.err == nil && password == p.last {
			err = errors.New("the proxy has refused the password, and it is still the same")
		}
		if err != nil {
			p.err, p.retryAt, p.wait = err, time.Now().Add(p.wait), min(2*p.wait, maxPasswordRetry)
			return
		}
		p.last, p.known, p.refused, p.err = password, true, false, nil
	})
}

// refuse is told that the proxy has refused password.
func (p *passwords) refuse(password string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known && p.last == password {
		p.refused = true
	}
}

// accept is told that the proxy has accepted password.
func (p *passwords) accept(password string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == password {
		p.wait = minPasswordRetry
	}
}

// passwordReader returns what reads the password of s. Its errors have nothing of what was
// read.
func (t *Transports) passwordReader(s *Proxy) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var content []byte
		var err error
		what := "passwordFile"
		switch {
		case len(s.PasswordCommand) > 0 && t.RunCommand != nil:
			what = "passwordCommand"
			content, err = t.RunCommand(ctx, s.PasswordCommand, maxPassword+2)
		case s.PasswordFile != "" && t.ReadFile != nil:
			content, err = t.ReadFile(s.PasswordFile)
		default:
			return "", errors.New("there is nothing to read the password from")
		}
		if err != nil {
			return "", fmt.Errorf("%s of upstreamProxy: %w", what, err)
		}
		password, err := parsePassword(content)
		if err != nil {
			return "", fmt.Errorf("%s of upstreamProxy: %w", what, err)
		}
		return password, nil
	}
}

// parsePassword returns the only line of content.
func parsePassword(content []byte) (string, error) {
	line := bytes.TrimSuffix(bytes.TrimSuffix(content, []byte("\n")), []byte("\r"))
	switch {
	case len(line) == 0:
		return "", errors.New("it has no password")
	case len(line) > maxPassword:
		return "", fmt.Errorf("it has more than %d bytes", maxPassword)
	case strings.ContainsFunc(string(line), func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "", errors.New("it has more than one line, or a control character")
	}
	return string(line), nil
}
