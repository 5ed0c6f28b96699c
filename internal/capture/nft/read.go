//go:build linux

package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// A Found is a table of the family inet as the kernel has it.
type Found struct {
	Name  string
	Owned bool
	Owner uint32 // of an owned one: the port of the netlink socket that it belongs to

	Sets  map[string][]Range // by name, sorted
	Rules []FoundRule        // of all chains, in order
}

// A Range is addresses from First to Last.
type Range struct{ First, Last netip.Addr }

// String returns r as an address or a prefix where it is one, and otherwise as "first-last".
func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	for bits := range r.First.BitLen() {
		if p := netip.PrefixFrom(r.First, bits); p.Masked() == p && last(p) == r.Last {
			return p.String()
		}
	}
	return r.First.String() + "-" + r.Last.String()
}

// A FoundRule is what one rule comes to.
type FoundRule struct {
	Chain string
	Terms []Term
}

// A Term is a match or a statement, in the words of the functions that make one: UID, Mark, L4,
// InInterface, ToPort, InSet, Cgroup, Redirect, TProxy, SetMark, Return. Others are left out.
type Term struct {
	Kind  TermKind
	Value []byte // as the kernel has it; of a Set, its name
}

// A TermKind is the function that makes a Term.
type TermKind string

// Kinds of Terms.
const (
	TermUID       TermKind = "uid"
	TermMark      TermKind = "mark"
	TermL4        TermKind = "l4"
	TermInterface TermKind = "interface"
	TermToPort    TermKind = "port"
	TermInSet     TermKind = "set"
	TermCgroup    TermKind = "cgroup"
	TermLocal     TermKind = "local"
	TermRedirect  TermKind = "redirect"
	TermTProxy    TermKind = "tproxy"
	TermSetMark   TermKind = "setmark"
	TermReturn    TermKind = "return"
)

// maxFound is how many bytes of answers are read for one question.
const maxFound = 64 << 20

// Tables returns the tables of the family inet whose names wanted reports true for, with all that
// they have.
func (c *Conn) Tables(wanted func(name string) bool) ([]Found, error) {
	var all []Found
	err := c.dump("list the tables", unix.NFT_MSG_GETTABLE, nil, func(a attributes) {
		t := Found{Name: a.text(unix.NFTA_TABLE_NAME), Sets: map[string][]Range{}}
		const owner = 7 // NFTA_TABLE_OWNER
		t.Owned, t.Owner = a.number(unix.NFTA_TABLE_FLAGS)&tableOwner != 0, a.number(owner)
		if wanted(t.Name) {
			all = append(all, t)
		}
	})
	for i := range all {
		if err == nil {
			err = c.fill(&all[i])
		}
	}
	return all, err
}

// fill reads the sets and the rules of t.
func (c *Conn) fill(t *Found) error {
	intervals := map[string]bool{} // by the name of the set
	err := c.dump("list the sets", unix.NFT_MSG_GETSET, func(m *message) { m.putString(unix.NFTA_SET_TABLE, t.Name) }, func(a attributes) {
		if a.text(unix.NFTA_SET_TABLE) == t.Name {
			intervals[a.text(unix.NFTA_SET_NAME)] = a.number(unix.NFTA_SET_FLAGS)&unix.NFT_SET_INTERVAL != 0
		}
	})
	if err != nil {
		return err
	}
	for name, interval := range intervals {
		var list []element
		err := c.dump("list set "+name, unix.NFT_MSG_GETSETELEM, func(m *message) {
			m.putString(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
			m.putString(unix.NFTA_SET_ELEM_LIST_SET, name)
		}, func(a attributes) {
			for _, e := range a.list(unix.NFTA_SET_ELEM_LIST_ELEMENTS) {
				addr, ok := netip.AddrFromSlice(e.nested(unix.NFTA_SET_ELEM_KEY).value(unix.NFTA_DATA_VALUE))
				if ok {
					list = append(list, element{addr, e.number(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0})
				}
			}
		})
		if err != nil {
			return err
		}
		t.Sets[name] = ranges(list, interval)
	}
	return c.dump("list the rules", unix.NFT_MSG_GETRULE, func(m *message) { m.putString(unix.NFTA_RULE_TABLE, t.Name) }, func(a attributes) {
		if a.text(unix.NFTA_RULE_TABLE) == t.Name {
			t.Rules = append(t.Rules, FoundRule{a.text(unix.NFTA_RULE_CHAIN), terms(a.list(unix.NFTA_RULE_EXPRESSIONS))})
		}
	})
}

// ranges joins the elements of a set: single addresses, or in intervals the firsts and the ends of
// ranges.
func ranges(list []element, intervals bool) []Range {
	slices.SortFunc(list, func(a, b element) int {
		if c := a.addr.Compare(b.addr); c != 0 || a.end == b.end {
			return c
		} else if a.end { // before the range that begins there
			return -1
		}
		return 1
	})
	var all []Range
	open := false
	for _, e := range list {
		switch {
		case !e.end:
			all, open = append(all, Range{e.addr, e.addr}), true
		case open:
			all[len(all)-1].Last, open = e.addr.Prev(), false
		}
	}
	if intervals && open { // up to the last address
		first := all[len(all)-1].First
		all[len(all)-1].Last = last(netip.PrefixFrom(first, 0))
	}
	return all
}

// terms returns what expressions come to. A match compares what the expression before it has
// loaded, and a statement takes what the one before it has loaded.
func terms(expressions []attributes) (all []Term) {
	var loaded TermKind
	var immediates [][]byte
	for _, e := range expressions {
		of := e.nested(unix.NFTA_EXPR_DATA)
		add := func(kind TermKind, value []byte) { all = append(all, Term{kind, value}) }
		latest := func(back int) []byte {
			if i := len(immediates) - back; i >= 0 {
				return immediates[i]
			}
			return nil
		}
		switch e.text(unix.NFTA_EXPR_NAME) {
		case "meta":
			key := of.number(unix.NFTA_META_KEY)
			if of.value(unix.NFTA_META_SREG) != nil {
				if key == unix.NFT_META_MARK {
					add(TermSetMark, latest(1))
				}
				continue
			}
			loaded = map[uint32]TermKind{unix.NFT_META_MARK: TermMark, unix.NFT_META_SKUID: TermUID, unix.NFT_META_L4PROTO: TermL4, unix.NFT_META_IIFNAME: TermInterface}[key]
		case "payload":
			loaded = ""
			if of.number(unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_TRANSPORT_HEADER && of.number(unix.NFTA_PAYLOAD_OFFSET) == portOffset {
				loaded = TermToPort
			}
		case "socket":
			loaded = ""
			if of.number(socketKey) == socketCgroupV2 {
				loaded = TermCgroup
			}
		case "fib":
			loaded = TermLocal
		case "cmp":
			if loaded != "" {
				add(loaded, of.nested(unix.NFTA_CMP_DATA).value(unix.NFTA_DATA_VALUE))
			}
			loaded = ""
		case "lookup":
			add(TermInSet, []byte(of.text(unix.NFTA_LOOKUP_SET)))
		case "immediate":
			data := of.nested(unix.NFTA_IMMEDIATE_DATA)
			if code := data.nested(unix.NFTA_DATA_VERDICT); code.value(unix.NFTA_VERDICT_CODE) != nil {
				if int32(code.number(unix.NFTA_VERDICT_CODE)) == unix.NFT_RETURN {
					add(TermReturn, nil)
				}
				continue
			}
			immediates = append(immediates, data.value(unix.NFTA_DATA_VALUE))
		case "redir":
			add(TermRedirect, latest(1))
		case "tproxy":
			add(TermTProxy, latest(1)) // the port comes after the address
		}
	}
	return all
}

// dump asks for a list, and calls each for every item.
func (c *Conn) dump(what string, command uint16, f func(*message), each func(attributes)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return errors.New("nftables: the socket is closed")
	}
	var b batch
	var m message
	if f != nil {
		f(&m)
	}
	b.add(what, unix.NFNL_SUBSYS_NFTABLES<<8|command, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, unix.NFPROTO_INET, 0, m)
	if err := unix.Sendto(c.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("nftables: %s: %w", what, err)
	}
	buf := make([]byte, 1<<16)
	for read := 0; read < maxFound; {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil: // the kernel answers within the call of sendto or recvfrom
			return fmt.Errorf("nftables: %s: read the answer: %w", what, err)
		}
		read += n
		done, err := parseMessages(buf[:n], each)
		if errors.Is(err, unix.EPERM) {
			err = ErrNotPermitted
		}
		if err != nil {
			return fmt.Errorf("nftables: %s: %w", what, err)
		}
		if done {
			return nil
		}
	}
	return fmt.Errorf("nftables: %s: the answer has more than %d bytes", what, maxFound)
}

var errCutOff = errors.New("the kernel's answer is cut off")

// parseMessages calls each for every message of nf_tables in b. It is done after the last one of
// a list.
func parseMessages(b []byte, each func(attributes)) (done bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return false, errCutOff
		}
		body := b[unix.NLMSG_HDRLEN:size]
		switch kind := binary.NativeEndian.Uint16(b[4:]); {
		case kind == unix.NLMSG_DONE:
			return true, nil
		case kind == unix.NLMSG_ERROR && len(body) >= 4:
			if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body))); errno != 0 {
				return true, errno
			}
			return true, nil
		case kind>>8 == unix.NFNL_SUBSYS_NFTABLES && len(body) >= 4:
			each(attributes(body[4:]))
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return false, nil
}

// attributes are those of a message, or of a nested attribute. What is not there reads as zero.
type attributes []byte

// each calls f for each attribute, until it returns false.
func (a attributes) each(f func(kind uint16, value []byte) bool) {
	for len(a) >= attrHeader {
		size := int(binary.NativeEndian.Uint16(a))
		if size < attrHeader || size > len(a) {
			return
		}
		if !f(binary.NativeEndian.Uint16(a[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), a[attrHeader:size]) {
			return
		}
		a = a[min(len(a), (size+3)&^3):]
	}
}

// value returns the first attribute of a kind, nil for none.
func (a attributes) value(kind uint16) (found []byte) {
	a.each(func(k uint16, v []byte) bool {
		if k == kind {
			found = v[:len(v):len(v)]
			return false
		}
		return true
	})
	return found
}

func (a attributes) nested(kind uint16) attributes { return a.value(kind) }

// list returns the items of a list.
func (a attributes) list(kind uint16) (all []attributes) {
	a.nested(kind).each(func(k uint16, v []byte) bool {
		if k == unix.NFTA_LIST_ELEM {
			all = append(all, v)
		}
		return true
	})
	return all
}

func (a attributes) number(kind uint16) uint32 {
	if v := a.value(kind); len(v) == 4 {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

func (a attributes) text(kind uint16) string {
	v := a.value(kind)
	for len(v) > 0 && v[len(v)-1] == 0 {
		v = v[:len(v)-1]
	}
	return string(v)
}
