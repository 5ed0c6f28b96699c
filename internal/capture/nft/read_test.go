//go:build linux

package nft

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// answerOf returns b as the kernel would answer.
func answerOf(kind uint16, m message) []byte {
	var b batch
	b.add("", unix.NFNL_SUBSYS_NFTABLES<<8|kind, 0, unix.NFPROTO_INET, 0, m)
	return b.buf
}

// ruleMessage returns a rule as replace writes it.
func ruleMessage(r Rule) []byte {
	var b batch
	b.chain("culvert", &Chain{Name: "output", Type: NAT, Hook: Output, Rules: []Rule{r}})
	return b.buf
}

// What is written is read as the same.
func TestTerms(t *testing.T) {
	set := &Set{Name: "vips6", Key: IPv6Addr}
	rule := All(InSet(set), UID(1000), Mark(7), InInterface("veth0"), Cgroup(9, 1), ToLocal(), L4(unix.IPPROTO_TCP), Opening(), ToPort(53), Redirect(15001), SetMark(8),
		TProxy(netip.MustParseAddrPort("[::1]:15002"), 9), Return())
	var got []Term
	if done, err := parseMessages(ruleMessage(rule), func(a attributes) { got = append(got, terms(a.list(unix.NFTA_RULE_EXPRESSIONS))...) }); done || err != nil {
		t.Fatalf("%t, %v", done, err)
	}
	want := []TermKind{TermInSet, TermUID, TermMark, TermInterface, TermCgroup, TermLocal, TermL4, TermToPort, TermRedirect, TermSetMark, TermTProxy, TermSetMark, TermReturn}
	if len(got) != len(want) {
		t.Fatalf("%d terms %q, want %q", len(got), got, want)
	}
	for i, kind := range want {
		if got[i].Kind != kind {
			t.Errorf("term %d is %q, want %q", i, got[i].Kind, kind)
		}
	}
	for i, want := range map[int]string{0: "vips6", 1: string(native(1000)), 7: "\x00\x35", 8: "\x3a\x99", 9: string(native(8)), 10: "\x3a\x9a"} {
		if string(got[i].Value) != want {
			t.Errorf("the value of %s is %q, want %q", got[i].Kind, got[i].Value, want)
		}
	}
}

func TestRangeString(t *testing.T) {
	for _, test := range []struct{ first, last, want string }{
		{"10.0.0.1", "10.0.0.1", "10.0.0.1"},
		{"10.0.0.0", "10.0.0.255", "10.0.0.0/24"},
		{"10.0.0.0", "10.0.1.127", "10.0.0.0-10.0.1.127"},
		{"0.0.0.0", "255.255.255.255", "0.0.0.0/0"},
		{"fd77::", "fd77:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fd77::/16"},
	} {
		if got := (Range{netip.MustParseAddr(test.first), netip.MustParseAddr(test.last)}).String(); got != test.want {
			t.Errorf("%s to %s is %q, want %q", test.first, test.last, got, test.want)
		}
	}
}

// Whatever the kernel answers is read to its end, without reading past it.
func FuzzRead(f *testing.F) {
	f.Add(ruleMessage(All(UID(1), Opening(), Redirect(2))))
	f.Add(answerOf(unix.NFT_MSG_NEWTABLE, nil))
	f.Add([]byte{16, 0, 0, 0, 3, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = parseMessages(b, func(a attributes) {
			_ = terms(a.list(unix.NFTA_RULE_EXPRESSIONS))
			var list []element
			for _, e := range a.list(unix.NFTA_SET_ELEM_LIST_ELEMENTS) {
				if addr, ok := netip.AddrFromSlice(e.nested(unix.NFTA_SET_ELEM_KEY).value(unix.NFTA_DATA_VALUE)); ok {
					list = append(list, element{addr, e.number(unix.NFTA_SET_ELEM_FLAGS) != 0})
				}
			}
			for _, r := range append(ranges(list, true), ranges(list, false)...) {
				_ = r.String()
			}
		})
	})
}
