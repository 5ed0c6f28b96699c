package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"culvert.dev/tunnel/internal/relay"
)

// An Undecided is a connection to a service that a Transport has dialed, of which the first bytes
// of the client decide what is spoken there: the Router calls Decide once, when the client has
// heard yes. Until then, nothing is read from it and nothing is written to it.
type Undecided interface {
	net.Conn

	// Decide reads what it needs of client, and returns what takes the place of both. A nil
	// client is one that cannot be looked at, and counts as one that says nothing. After an
	// error, Undecided is closed and client is the caller's to end. The error is an *Error.
	Decide(ctx context.Context, client Stream) (Stream, net.Conn, error)
}

// decide completes server. After an error both sides are ended, and l is given back.
func (r *Router) decide(ctx context.Context, u Undecided, client Stream, l *lease) (_ Stream, server net.Conn, err error) {
	decided := false
	defer func() {
		if !decided { // refused, or a panic is on its way up
			_ = u.Close()
			if client != nil {
				_ = relay.AbortWithReason(client, reasonOr(err, Internal))
			}
			r.giveBack(l, isMultiplexed(u))
		}
	}()
	next, server, err := u.Decide(ctx, client)
	if err != nil {
		return nil, nil, &Error{Reason: reasonOr(err, DialFailed), Err: fmt.Errorf("after the client was told yes: %w", err)}
	}
	decided = true
	if isMultiplexed(server) && !isMultiplexed(u) {
		r.Budget.Give(1)
		l.client.addDescriptors(-1)
	}
	return next, server, nil
}

// ReadFirst reads what a client sends first, until that is enough or wait is over. What it returns
// is to be put back by Begun. The error is io.EOF where the client has ended its direction, with
// what it had sent, and otherwise an *Error: the client is gone, or ctx is done.
func ReadFirst(ctx context.Context, client net.Conn, wait time.Duration, enough func(first []byte) bool) (first []byte, err error) {
	left := func(err error) error {
		return &Error{Reason: Gone, Err: fmt.Errorf("the client left before it sent anything: %w", err)}
	}
	if err := client.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return nil, left(err)
	}
	stop := context.AfterFunc(ctx, func() {
		defer func() { _ = recover() }() // a carrier's: the read ends by its own deadline then
		_ = client.SetReadDeadline(time.Now())
	})
	defer stop()
	drained := func() error {
		return &Error{Reason: Drain, Err: fmt.Errorf("the client had not sent enough: %w", context.Cause(ctx))}
	}
	buf := make([]byte, 2048) // most hellos
	n := 0
	var end error
	for !enough(buf[:n]) && n < len(buf) {
		m, err := client.Read(buf[n:])
		n += m
		if err == nil || enough(buf[:n]) {
			continue
		}
		if ctx.Err() != nil {
			return nil, drained()
		}
		var timeout interface{ Timeout() bool }
		if errors.Is(err, io.EOF) {
			end = io.EOF
			break
		}
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			return nil, left(err)
		}
		break
	}
	if !stop() {
		return nil, drained() // and the deadline may be set at any moment
	}
	if err := client.SetReadDeadline(time.Time{}); err != nil {
		return nil, left(err)
	}
	return buf[:n:n], end
}

// Begun returns client with the first bytes back, which were read of it.
func Begun(client Stream, first []byte) Stream { return &begun{client, first} }

// MayBeTLS reports whether a client that begins with first, of 6 bytes or more, begins a TLS
// handshake, and of less whether it may yet.
func MayBeTLS(first []byte) bool { return mayBeTLS(first) }
