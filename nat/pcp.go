package nat

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
)

// The port of routers that speak PCP and NAT-PMP, and the one at which hosts hear their
// announcements: RFC 6887 section 19.1.
const (
	routerPort       = 5351
	announcementPort = 5350
)

// The wire format of PCP, RFC 6887 sections 7 and 11.1: a header of 24 bytes, and behind it
// 36 bytes for MAP.
//
//	request   0 version  1 opcode        2-3 reserved           4-7 lifetime  8-23 client address
//	response  0 version  1 0x80|opcode   2 reserved  3 result   4-7 lifetime  8-11 epoch
//	MAP       24-35 nonce  36 protocol  40-41 internal port  42-43 external port  44-59 external address
const (
	pcpVersion    = 2
	pcpHeaderSize = 24
	pcpMapSize    = pcpHeaderSize + 36

	pcpAnnounce = 0
	pcpMap      = 1
	pcpResponse = 0x80

	pcpUnsupportedVersion = 1
)

// maxErrorLifetime is how long a router's refusal is believed to last at most: RFC 6887
// section 15, "lifetime of an error", allows no more than half an hour.
const maxErrorLifetime = 30 * time.Minute

// pcpResults are the result codes of RFC 6887 section 7.4 in plain words.
var pcpResults = [...]string{
	1:  "it does not speak this version of PCP",
	2:  "port mapping is switched off, or not allowed for this host",
	3:  "it could not read the request",
	4:  "it maps no ports",
	5:  "it does not know an option of the request",
	6:  "it could not read an option of the request",
	7:  "it has no outside address at the moment",
	8:  "it has no room for another mapping",
	9:  "it does not map this protocol",
	10: "this host has as many mappings as it may have",
	11: "the outside port or address is taken or not allowed",
	12: "there is another NAT between this host and the router",
	13: "the mapping has too many remote peers",
}

// A pcpReply is a response of PCP that was parsed.
type pcpReply struct {
	opcode   byte
	result   byte
	lifetime time.Duration
	epoch    uint32

	// Of MAP.
	nonce    [12]byte
	protocol byte
	internal uint16
	external netip.AddrPort
}

// protocolNumber returns the number of "tcp" or "udp" in the headers of IP.
func protocolNumber(network string) byte {
	if network == "udp" {
		return 17
	}
	return 6
}

// appendPCP appends a request with a header alone.
func appendPCP(b []byte, opcode byte, lifetime time.Duration, local netip.Addr) []byte {
	b = append(b, pcpVersion, opcode, 0, 0)
	b = binary.BigEndian.AppendUint32(b, seconds(lifetime))
	from := local.As16() // an IPv4 address is mapped into IPv6: section 5
	return append(b, from[:]...)
}

// appendPCPMap appends a MAP request.
func appendPCPMap(b []byte, r Request, local netip.Addr) []byte {
	b = appendPCP(b, pcpMap, r.Lifetime, local)
	b = append(b, r.Nonce[:]...)
	b = append(b, protocolNumber(r.Network), 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, r.Internal)
	external := r.External
	if r.Lifetime == 0 { // section 15.1
		external = netip.AddrPort{}
	}
	b = binary.BigEndian.AppendUint16(b, external.Port())
	to := external.Addr()
	if !to.IsValid() {
		to = netip.IPv4Unspecified()
		if local.Is6() {
			to = netip.IPv6Unspecified()
		}
	}
	want := to.As16()
	return append(b, want[:]...)
}

// seconds returns d in seconds as messages have it: less than a second is one, so that it does
// not delete.
func seconds(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(min(max(d/time.Second, 1), 1<<32-1))
}

// parsePCP parses a response. It is of no other version than 2: a router of NAT-PMP answers
// with version 0, and the error is a *Refusal then.
func parsePCP(b []byte) (r pcpReply, err error) {
	if len(b) >= 8 && b[0] == 0 && b[1]&pcpResponse != 0 {
		return r, pcpRefusal(pcpUnsupportedVersion, 0)
	}
	switch {
	case len(b) > maxMessage:
		return r, fmt.Errorf("nat: message of PCP is %d bytes or more, limit %d", len(b), maxMessage)
	case len(b) < pcpHeaderSize || len(b)%4 != 0:
		return r, fmt.Errorf("nat: message of PCP is %d bytes, not a multiple of 4 from %d", len(b), pcpHeaderSize)
	case b[1]&pcpResponse == 0:
		return r, fmt.Errorf("nat: opcode %#x of PCP is none of a response", b[1])
	}
	r = pcpReply{
		opcode: b[1] &^ pcpResponse, result: b[3], epoch: binary.BigEndian.Uint32(b[8:]),
		lifetime: time.Duration(binary.BigEndian.Uint32(b[4:])) * time.Second,
	}
	if b[0] != pcpVersion {
		if r.result != pcpUnsupportedVersion {
			return pcpReply{}, fmt.Errorf("nat: version %d of PCP, want %d", b[0], pcpVersion)
		}
		return r, nil
	}
	if r.opcode != pcpMap {
		return r, nil
	}
	if len(b) < pcpMapSize {
		return pcpReply{}, fmt.Errorf("nat: response of MAP is %d bytes, less than %d", len(b), pcpMapSize)
	}
	copy(r.nonce[:], b[24:])
	r.protocol = b[36]
	r.internal = binary.BigEndian.Uint16(b[40:])
	r.external = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[44:60])).Unmap(), binary.BigEndian.Uint16(b[42:]))
	return r, nil
}

// pcpRefusal makes an error of a result code.
func pcpRefusal(code byte, lifetime time.Duration) *Refusal {
	text := "it does not say why"
	if int(code) < len(pcpResults) && pcpResults[code] != "" {
		text = pcpResults[code]
	}
	return &Refusal{
		Protocol: "pcp", Code: int(code), Text: text, For: min(lifetime, maxErrorLifetime),
		Taken: code == 11, Forever: code == pcpUnsupportedVersion || code == 4 || code == 12,
	}
}

// A PCP is a Client of a router that speaks PCP.
type PCP struct {
	Router netip.Addr
	Dial   DialFunc // nil means a net.Dialer's

	epoch epoch
	lost  bool // since the last Poll
}

// Protocol returns "pcp".
func (c *PCP) Protocol() string { return "pcp" }

// pcpSchedule is that of RFC 6887 section 8.1.1.
var pcpSchedule = doubling(3*time.Second, 1024*time.Second, 0)

// Map asks the router for a mapping: RFC 6887 section 11.
func (c *PCP) Map(ctx context.Context, r Request) (Grant, error) {
	reply, err := c.ask(ctx, pcpSchedule, func(local netip.Addr) []byte { return appendPCPMap(nil, r, local) }, func(reply *pcpReply) bool {
		return reply.opcode == pcpMap && reply.nonce == r.Nonce && reply.protocol == protocolNumber(r.Network) && reply.internal == r.Internal
	})
	switch {
	case err != nil:
		return Grant{}, err
	case reply.lifetime == 0 && r.Lifetime != 0:
		return Grant{}, &Refusal{Protocol: "pcp", Text: "it granted the mapping for no time"}
	}
	return Grant{External: reply.external, Lifetime: reply.lifetime}, nil
}

// Poll asks by ANNOUNCE for the router's epoch: RFC 6887 section 14.1.
func (c *PCP) Poll(ctx context.Context) (outside netip.Addr, lost bool, err error) {
	_, err = c.ask(ctx, natpmpSchedule, func(local netip.Addr) []byte { return appendPCP(nil, pcpAnnounce, 0, local) }, func(reply *pcpReply) bool {
		return reply.opcode == pcpAnnounce
	})
	lost, c.lost = c.lost, false
	return netip.Addr{}, lost, err
}

// ask sends a request and waits for the reply to it.
func (c *PCP) ask(ctx context.Context, next schedule, request func(local netip.Addr) []byte, mine func(*pcpReply) bool) (reply pcpReply, err error) {
	err = exchange(ctx, dialOr(c.Dial), netip.AddrPortFrom(c.Router, routerPort), next, request, func(answer []byte) error {
		reply, err = parsePCP(answer)
		if refusal, ok := err.(*Refusal); ok {
			return refusal
		}
		switch {
		case err != nil:
			return errOther
		case reply.result == pcpUnsupportedVersion:
			return pcpRefusal(reply.result, reply.lifetime)
		case !mine(&reply):
			return errOther
		}
		c.lost = c.epoch.lost(reply.epoch, time.Now()) || c.lost
		if reply.result != 0 {
			return pcpRefusal(reply.result, reply.lifetime)
		}
		return nil
	})
	return reply, err
}
