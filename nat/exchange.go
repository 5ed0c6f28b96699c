package nat

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"
)

// A DialFunc opens a connected UDP socket, which receives datagrams only from the address that was
// dialed.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// maxMessage is the largest message of PCP, in bytes: RFC 6887 section 7. Those of NAT-PMP and
// the answers to STUN that count are shorter.
const maxMessage = 1100

// errOther is returned by a reader for a datagram that answers something else.
var errOther = errors.New("nat: not an answer to the request")

// A schedule returns how long to wait for an answer before sending the request again, and
// whether to send it at all. attempt is 0 for the first.
type schedule func(attempt int) (wait time.Duration, send bool)

// doubling returns a schedule that begins with first and doubles up to most, for so many
// attempts; 0 means without end. Each wait is randomly 10 % longer or shorter.
func doubling(first, most time.Duration, attempts int) schedule {
	return func(attempt int) (time.Duration, bool) {
		if attempts > 0 && attempt >= attempts {
			return 0, false
		}
		wait := most
		if attempt < 32 && first<<attempt < most {
			wait = first << attempt
		}
		return wait + time.Duration((rand.Float64()-0.5)/5*float64(wait)), true
	}
}

// exchange sends a server what request returns, repeatedly by the schedule next, until read accepts
// an answer or returns an error other than errOther. request gets the address that the socket has
// towards the server.
func exchange(ctx context.Context, dial DialFunc, server netip.AddrPort, next schedule, request func(local netip.Addr) []byte, read func(answer []byte) error) error {
	conn, err := dial(ctx, "udp", server.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	out := request(addrOf(conn.LocalAddr()))
	in := make([]byte, maxMessage+1)
	for attempt := 0; ; attempt++ {
		wait, send := next(attempt)
		if !send {
			return fmt.Errorf("%s does not answer", server)
		}
		if _, err := conn.Write(out); err != nil {
			return err
		}
		until := time.Now().Add(wait)
		if err := conn.SetReadDeadline(until); err != nil {
			return err
		}
		for ctx.Err() == nil {
			n, err := conn.Read(in)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return err
			}
			if err := read(in[:n]); !errors.Is(err, errOther) {
				return err
			}
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s does not answer: %w", server, context.Cause(ctx))
		}
	}
}

// addrOf returns the IP address of a, and the zero Addr if it has none.
func addrOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap().WithZone("")
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// A Request asks for one mapping.
type Request struct {
	Network  string         // "tcp" or "udp"
	Internal uint16         // port of this host
	External netip.AddrPort // to ask for outside; a port of 0 means any
	Lifetime time.Duration  // to ask for; 0 deletes the mapping
	Nonce    [12]byte       // of the mapping, for PCP: only with the same one can it be changed
}

// A Grant is what a router has granted.
type Grant struct {
	External netip.AddrPort // the address is zero where the protocol does not say it
	Lifetime time.Duration  // 0 means until it is deleted, or the router restarts
	Check    time.Duration  // until the latest request that finds out whether the mapping was lost; 0 means that none is needed
}

// A Client asks one router by one protocol. Its methods are not called at once, and return
// when ctx ends.
type Client interface {
	// Protocol is "pcp", "nat-pmp" or "upnp".
	Protocol() string

	// Map asks for a mapping, renews it, or deletes it. An error that the router gave is a
	// *Refusal.
	Map(ctx context.Context, r Request) (Grant, error)

	// Poll asks whether the router is there and what its outside address is: the zero
	// Addr where the protocol does not say it without a mapping. lost reports that the router has
	// lost its mappings since the last answer.
	Poll(ctx context.Context) (outside netip.Addr, lost bool, err error)
}

// A Refusal is the answer of a router that does not do what it was asked.
type Refusal struct {
	Protocol string        // as of Client
	Code     int           // of the protocol
	Text     string        // in plain words
	For      time.Duration // how long the router expects it to last; 0 where it does not say
	Taken    bool          // the outside port is somebody else's: another one may be free
	Forever  bool          // the same request is refused again until the router changes
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("the router refused by %s: %s (code %d)", r.Protocol, r.Text, r.Code)
}

// An epoch finds out whether a router has lost its state, by the number of seconds for which the
// router says that it has kept it. The zero epoch has no answer yet.
type epoch struct {
	known  bool
	server uint32
	client time.Time
}

// lost records what the router says at now, and reports whether the mappings from before are
// gone: RFC 6887 section 8.5. Router and client may each be wrong by a sixteenth, and two seconds.
func (e *epoch) lost(server uint32, now time.Time) bool {
	was := *e
	*e = epoch{true, server, now}
	if !was.known {
		return false
	}
	if int64(server)+1 < int64(was.server) {
		return true
	}
	clientDelta := int64(now.Sub(was.client) / time.Second)
	serverDelta := int64(server) - int64(was.server)
	return clientDelta+2 < serverDelta-serverDelta/16 || serverDelta+2 < clientDelta-clientDelta/16
}
