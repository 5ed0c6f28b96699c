package nat

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// The wire format of NAT-PMP, RFC 6886 sections 3.2 and 3.3.
//
//	address   0 version  1 opcode 0
//	response  0 version  1 opcode 128    2-3 result    4-7 epoch  8-11 outside address
//	map       0 version  1 opcode 1, 2   2-3 reserved  4-5 internal port  6-7 external port  8-11 lifetime
//	response  0 version  1 opcode 129..  2-3 result    4-7 epoch  8-9 internal port  10-11 external port  12-15 lifetime
const (
	natpmpAddress  = 0
	natpmpMapUDP   = 1
	natpmpMapTCP   = 2
	natpmpResponse = 128
)

// natpmpResults are the result codes of RFC 6886 section 3.5 in plain words.
var natpmpResults = [...]string{
	1: "it does not speak this version of NAT-PMP",
	2: "port mapping is switched off, or not allowed for this host",
	3: "it has no outside address at the moment",
	4: "it has no room for another mapping",
	5: "it does not map this protocol",
}

// A natpmpReply is a response of NAT-PMP that was parsed.
type natpmpReply struct {
	opcode  byte
	result  uint16
	epoch   uint32
	outside netip.Addr // of an address response

	// Of a map response.
	internal, external uint16
	lifetime           time.Duration
}

// natpmpOpcode returns the opcode that maps "tcp" or "udp".
func natpmpOpcode(network string) byte {
	if network == "udp" {
		return natpmpMapUDP
	}
	return natpmpMapTCP
}

// appendNATPMPMap appends a mapping request.
func appendNATPMPMap(b []byte, r Request) []byte {
	external := r.External.Port()
	if r.Lifetime == 0 { // section 3.4
		external = 0
	}
	b = append(b, 0, natpmpOpcode(r.Network), 0, 0)
	b = binary.BigEndian.AppendUint16(b, r.Internal)
	b = binary.BigEndian.AppendUint16(b, external)
	return binary.BigEndian.AppendUint32(b, seconds(r.Lifetime))
}

// parseNATPMP parses a response. One with an error may be as short as its epoch.
func parseNATPMP(b []byte) (r natpmpReply, err error) {
	switch {
	case len(b) < 8:
		return r, fmt.Errorf("nat: message of NAT-PMP is %d bytes, less than 8", len(b))
	case b[0] != 0 || b[1] < natpmpResponse:
		return r, fmt.Errorf("nat: version %d and opcode %d are none of a response of NAT-PMP", b[0], b[1])
	}
	r = natpmpReply{opcode: b[1] - natpmpResponse, result: binary.BigEndian.Uint16(b[2:]), epoch: binary.BigEndian.Uint32(b[4:])}
	if r.result != 0 {
		if len(b) >= 10 && r.opcode != natpmpAddress {
			r.internal = binary.BigEndian.Uint16(b[8:])
		}
		return r, nil
	}
	switch {
	case r.opcode == natpmpAddress && len(b) >= 12:
		r.outside = netip.AddrFrom4([4]byte(b[8:12]))
	case (r.opcode == natpmpMapUDP || r.opcode == natpmpMapTCP) && len(b) >= 16:
		r.internal, r.external = binary.BigEndian.Uint16(b[8:]), binary.BigEndian.Uint16(b[10:])
		r.lifetime = time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Second
	default:
		return natpmpReply{}, fmt.Errorf("nat: opcode %d of NAT-PMP with %d bytes", b[1], len(b))
	}
	return r, nil
}

// natpmpRefusal makes an error of a result code.
func natpmpRefusal(code uint16) *Refusal {
	text := "it does not say why"
	if int(code) < len(natpmpResults) && natpmpResults[code] != "" {
		text = natpmpResults[code]
	}
	return &Refusal{Protocol: "nat-pmp", Code: int(code), Text: text, Forever: code == 1 || code == 5}
}

// A NATPMP is a Client of a router that speaks NAT-PMP.
type NATPMP struct {
	Router netip.Addr
	Dial   DialFunc // nil means a net.Dialer's

	epoch epoch
	lost  bool // since the last Poll
}

// Protocol returns "nat-pmp".
func (c *NATPMP) Protocol() string { return "nat-pmp" }

// natpmpSchedule is that of RFC 6886 section 3.1: 250 ms, doubling, nine times.
var natpmpSchedule = doubling(250*time.Millisecond, 64*time.Second, 9)

// Map asks the router for a mapping: RFC 6886 section 3.3.
func (c *NATPMP) Map(ctx context.Context, r Request) (Grant, error) {
	opcode := natpmpOpcode(r.Network)
	reply, err := c.ask(ctx, appendNATPMPMap(nil, r), func(reply *natpmpReply) bool {
		return reply.opcode == opcode && (reply.internal == r.Internal || reply.internal == 0 && reply.result != 0)
	})
	switch {
	case err != nil || r.Lifetime == 0:
		return Grant{}, err
	case reply.lifetime == 0 || reply.external == 0:
		return Grant{}, &Refusal{Protocol: "nat-pmp", Text: "it granted the mapping for no time"}
	}
	return Grant{External: netip.AddrPortFrom(netip.Addr{}, reply.external), Lifetime: reply.lifetime}, nil
}

// Poll asks for the router's outside address: RFC 6886 section 3.2.
func (c *NATPMP) Poll(ctx context.Context) (outside netip.Addr, lost bool, err error) {
	reply, err := c.ask(ctx, []byte{0, natpmpAddress}, func(reply *natpmpReply) bool { return reply.opcode == natpmpAddress })
	lost, c.lost = c.lost, false
	return reply.outside, lost, err
}

func (c *NATPMP) ask(ctx context.Context, request []byte, mine func(*natpmpReply) bool) (reply natpmpReply, err error) {
	err = exchange(ctx, dialOr(c.Dial), netip.AddrPortFrom(c.Router, routerPort), natpmpSchedule, func(netip.Addr) []byte { return request }, func(answer []byte) error {
		if reply, err = parseNATPMP(answer); err != nil || !mine(&reply) {
			return errOther
		}
		c.lost = c.epoch.lost(reply.epoch, time.Now()) || c.lost
		if reply.result != 0 {
			return natpmpRefusal(reply.result)
		}
		return nil
	})
	return reply, err
}

func dialOr(dial DialFunc) DialFunc {
	if dial == nil {
		return new(net.Dialer).DialContext
	}
	return dial
}
