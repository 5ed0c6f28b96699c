package socks5

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"culvert.dev/tunnel"
)

// writeTimeout limits the write of a message to the client. It fits in any socket
// buffer, so only other carriers reach the limit.
const writeTimeout = time.Second

// A wrong password is answered after a delay between these, whatever was wrong with
// it: so the delay reveals nothing, and guessing takes its time.
const (
	minPasswordDelay = time.Second
	maxPasswordDelay = minPasswordDelay + minPasswordDelay/4
)

// A Protocol is the proxy side of SOCKS5. The zero value serves everybody who
// can connect: what may be reached is the Handler's to say. A Protocol is safe
// for any number of connections at once.
type Protocol struct {
	// Verify, if set, has to accept the user name and password of every client (RFC
	// 1929) before its request is read; a client that does not offer them is
	// refused. It returns nil if they are right, and a *tunnel.Error if it has not
	// checked them. It has to do the same work for a user that does not exist, and
	// must not keep or log the password.
	//
	// Names and passwords are valid UTF-8 without control characters, and
	// not empty: Verify gets no others.
	Verify func(ctx context.Context, from netip.Addr, user, password string) error

	// Off reports that clients need no name and password at this moment, in spite
	// of Verify. Nil means that they always do.
	Off func() bool
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
)

// Asks reports whether clients need a name and a password at this moment.
func (p *Protocol) Asks() bool { return p.Verify != nil && (p.Off == nil || !p.Off()) }

// Name returns "socks5".
func (*Protocol) Name() string { return "socks5" }

// Sniff says Yes to the version byte of SOCKS5, and to that of SOCKS4 to
// refuse it in its own words. No other protocol here begins with these.
func (*Protocol) Sniff(prefix []byte) tunnel.Verdict {
	if prefix[0] == version5 || prefix[0] == version4 {
		return tunnel.Yes
	}
	return tunnel.No
}

// HasPreamble implements tunnel.PreambleDetector: the greeting is complete, or cannot be one. The
// rest of the preamble comes only after an answer, so ServeConn may wait for it all
// the same; Fill says so to the loop.
func (*Protocol) HasPreamble(prefix []byte) bool {
	if len(prefix) > 0 && prefix[0] != version5 {
		return true
	}
	_, _, err := parseGreeting(prefix)
	return err == nil
}

// ServeConn answers the client's greeting, checks its password if that is required,
// reads its request and calls h with it.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	s := session{c: c}
	verify := p.Asks()
	err := s.greet(verify)
	if err == nil && verify {
		err = s.authenticate(ctx, p.Verify)
	}
	var to destination
	if err == nil {
		to, err = s.request()
	}
	if err != nil {
		return err
	}
	req := c.NewRequest(p.Name())
	req.Name, req.Addr, req.Port = to.name, to.addr, to.port
	if verify {
		req.Peer = s.peer.WithActor(req.Peer)
	}
	req.Accept = func() (tunnel.Stream, error) {
		if err := s.write(answer(Succeeded)); err != nil {
			return nil, s.readError(err)
		}
		return c.Accept()
	}
	req.Refuse = func(err error) { c.CloseWithMessage(answer(ReplyFor(err))) }
	h.ServeTunnel(ctx, req)
	return nil
}

// A session is a connection whose request was not read yet. An error that its
// methods return was sent to the client.
type session struct {
	c    *tunnel.Conn
	read int // bytes of the messages that were handled
	peer tunnel.Peer
}

// greet reads the greeting and chooses the method of authentication.
func (s *session) greet(verify bool) error {
	for {
		b := s.c.Buffered()
		if len(b) > 0 && b[0] != version5 {
			return s.refuseVersion(b[0])
		}
		methods, n, err := parseGreeting(b)
		if err == nil {
			return s.agree(methods, n, verify)
		}
		if err := s.fill(); err != nil {
			return err
		}
	}
}

func (s *session) agree(methods []byte, n int, verify bool) error {
	want, why, how := byte(methodNone), tunnel.Unsupported, "no authentication (0x00)"
	if verify {
		want, why, how = methodPassword, tunnel.NoAuth, "a user name and a password (0x02)"
	}
	if !slices.Contains(methods, want) {
		err := tunnel.Refusef(why, "socks5: the client offers the methods [% x], and this port wants %s", methods[:min(len(methods), 16)], how)
		s.c.CloseWithMessage([]byte{version5, methodRefused})
		return err
	}
	s.discard(n)
	if err := s.write([]byte{version5, want}); err != nil {
		return s.readError(err)
	}
	return nil
}

// refuseVersion refuses a connection that does not begin like SOCKS5.
func (s *session) refuseVersion(first byte) error {
	if first == version4 {
		s.c.CloseWithMessage([]byte{0, 0x5b, 0, 0, 0, 0, 0, 0}) // request rejected
		return tunnel.Refusef(tunnel.Unsupported, "socks5: the client speaks SOCKS4: it has to use SOCKS5 and leave the lookup of names to the proxy (socks5h)")
	}
	_ = s.c.Abort()
	return tunnel.Refusef(tunnel.BadPreamble, "socks5: the first byte is %#02x, want %#02x", first, version5)
}

// authenticate reads a user name and a password and checks them, RFC 1929.
func (s *session) authenticate(ctx context.Context, verify func(ctx context.Context, from netip.Addr, user, password string) error) error {
	for {
		user, password, n, err := parsePassword(s.c.Buffered())
		if err == errMore {
			if err := s.fill(); err != nil {
				return err
			}
			continue
		}
		came := time.Now()
		if err == nil {
			s.discard(n)
			wrong := errors.New("empty, not UTF-8 or with control characters")
			if usable(user) && usable(password) {
				wrong = verify(ctx, s.c.NewRequest("socks5").Source.Addr(), user, password)
			}
			if wrong == nil {
				s.peer = tunnel.Peer{ID: user, Method: "basic"}
				if err := s.write([]byte{versionAuth, 0}); err != nil {
					return s.readError(err)
				}
				return nil
			}
			if refused := (*tunnel.Error)(nil); errors.As(wrong, &refused) {
				s.c.CloseWithMessage([]byte{versionAuth, 1}) // at once: nothing was checked
				return tunnel.Refusef(refused.Reason, "socks5: %w", refused)
			}
			err = errors.New("the user name or the password is wrong")
		}
		delayAnswer(ctx, came)
		s.c.CloseWithMessage([]byte{versionAuth, 1})
		return tunnel.Refusef(tunnel.NoAuth, "socks5: %w", err)
	}
}

// usable reports whether connect would take s in Proxy-Authorization: an ID ends up
// in logs.
func usable(s string) bool {
	return s != "" && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// delayAnswer waits until a wrong password that was read at came may be answered.
func delayAnswer(ctx context.Context, came time.Time) {
	t := time.NewTimer(time.Until(came.Add(minPasswordDelay + rand.N(maxPasswordDelay-minPasswordDelay))))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// request reads the request.
func (s *session) request() (destination, error) {
	for {
		to, n, err := parseRequest(s.c.Buffered())
		if err == nil {
			s.discard(n)
			return to, nil
		}
		if err != errMore {
			reply := ReplyFor(err)
			why := tunnel.BadRequest
			if reply == CommandNotSupported || reply == AddressTypeNotSupported {
				why = tunnel.Unsupported
			}
			s.c.CloseWithMessage(answer(reply))
			return destination{}, tunnel.Refusef(why, "socks5: %w", err)
		}
		if err := s.fill(); err != nil {
			return destination{}, err
		}
	}
}

func (s *session) discard(n int) {
	s.c.Discard(n)
	s.read += n
}

// write writes a part of the preamble to the client.
func (s *session) write(b []byte) error {
	_ = s.c.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.c.Write(b)
	return err
}

func (s *session) fill() error {
	if err := s.c.Fill(maxMessage); err != nil {
		_ = s.c.Abort()
		return s.readError(err)
	}
	return nil
}

// readError returns the error for a client that sends no more. It gets no answer: it
// is gone, or slow on purpose.
func (s *session) readError(err error) error {
	return tunnel.PreambleErrorAfter(int64(s.read+len(s.c.Buffered())), err)
}
