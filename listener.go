package culvert

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"culvert.dev/internal/gateway"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// backlog is how many streams wait for Accept. More are refused.
const backlog = 128

// A Listener serves a name on gateways: it keeps a reverse session to each, also after one was
// lost, and accepts the streams of those who ask for the name. It is a net.Listener.
type Listener struct {
	address string
	by      *running
	waiting chan struct{} // has one for each stream before Accept
	streams chan tunnel.Stream
	closed  chan struct{}
	closing sync.Once
}

var _ net.Listener = (*Listener)(nil)

// Listen serves address, NAME or NAME:PORT, at the gateways; without PORT it serves every port.
// It returns once one of them has taken the name, with an error if none ever will, or when ctx
// is done, which has no effect after that. A gateway lets a caller register a name by a policy
// with the verb "register".
func Listen(ctx context.Context, address string, via *Gateways) (*Listener, error) {
	if err := via.check(); err != nil {
		return nil, err
	}
	l := &Listener{address: address, waiting: make(chan struct{}, backlog), streams: make(chan tunnel.Stream, backlog), closed: make(chan struct{})}
	exposed := gateway.Exposed{Serve: l.serve}
	host, port, err := net.SplitHostPort(address)
	if err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("culvert: %q: write NAME or NAME:PORT", address)
		}
		exposed.Port = uint16(n)
	} else {
		host = address
	}
	if exposed.Name, err = tunnel.ParsePattern(host); err != nil {
		return nil, fmt.Errorf("culvert: %q is not a name to serve: %w", address, err)
	}
	sessions := &gateway.Reverse{Replicas: 1, Expose: []gateway.Exposed{exposed}}
	for _, to := range via.Addresses {
		hop := via.hop(via.carriers()[0])
		switch hop.Proto {
		case "connect", "connect-h2":
			to = "https://" + to
		case "websocket":
			to = "wss://" + to
		}
		hop.Addresses = []string{to}
		sessions.Gateways = append(sessions.Gateways, hop)
	}
	if l.by, err = via.run(ctx, sessions); err != nil {
		return nil, err
	}
	if err := l.registered(ctx); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// registered waits until a gateway has taken the name.
func (l *Listener) registered(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		states := l.by.ReverseSessions()
		refused, last := 0, error(nil)
		for _, s := range states {
			if !s.Connected {
				if last = s.Err; reverse.Permanent(last) {
					refused++
				}
				continue
			}
			for _, n := range s.Names {
				if n.Reason == "" {
					return nil
				}
				refused++
				last = &tunnel.Error{Reason: n.Reason, Err: fmt.Errorf("culvert: gateway %s refused %q: %s", s.Gateway, l.address, n.Error)}
			}
		}
		if refused > 0 && refused == len(states) {
			return last
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("culvert: no gateway has taken %q: %w", l.address, ctx.Err()), last)
		case <-tick.C:
		}
	}
}

// serve is called for each request for the name.
func (l *Listener) serve(admit func() (tunnel.Stream, error)) error {
	select {
	case l.waiting <- struct{}{}:
	default:
		return tunnel.Refusef(tunnel.Overload, "culvert: %d streams for %q wait to be accepted", backlog, l.address)
	}
	c, err := admit()
	if err != nil { // the client has heard
		<-l.waiting
		return nil
	}
	l.streams <- c // for which there is room
	return nil
}

// Accept implements net.Listener. The net.Conn has CloseWrite, and its RemoteAddr is the
// gateway's: who calls is said inside, as the documentation of the package has it.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed: // before what waits
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.streams:
		<-l.waiting
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close gives the name back and ends the sessions, and with them all connections, also those
// that were accepted.
func (l *Listener) Close() error {
	l.closing.Do(func() {
		close(l.closed)
		l.by.stop()
	})
	return nil
}

// Addr implements net.Listener: it is the name that is served.
func (l *Listener) Addr() net.Addr { return nameAddr(l.address) }

// A nameAddr is the address of a Listener.
type nameAddr string

// Network implements net.Addr.
func (nameAddr) Network() string { return "culvert" }

func (a nameAddr) String() string { return string(a) }
