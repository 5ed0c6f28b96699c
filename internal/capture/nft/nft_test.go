//go:build linux

package nft

import (
	"net/netip"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMerge(t *testing.T) {
	for _, test := range []struct {
		in   []string
		want []string // first and last of each range
	}{
		{nil, nil},
		{[]string{"10.0.0.0/8", "10.1.0.0/16"}, []string{"10.0.0.0", "10.255.255.255"}},
		{[]string{"10.0.1.0/24", "10.0.0.0/24"}, []string{"10.0.0.0", "10.0.1.255"}},
		{[]string{"10.0.0.7/8"}, []string{"10.0.0.0", "10.255.255.255"}},
		{[]string{"0.0.0.0/0"}, []string{"0.0.0.0", "255.255.255.255"}},
		{[]string{"255.255.255.255/32", "1.2.3.4/32", "1.2.3.4/32"}, []string{"1.2.3.4", "1.2.3.4", "255.255.255.255", "255.255.255.255"}},
		{[]string{"fd00::/8", "fd00:1::/64"}, []string{"fd00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}},
		{[]string{"::/0", "::1/128"}, []string{"::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}},
	} {
		var in []netip.Prefix
		for _, p := range test.in {
			in = append(in, netip.MustParsePrefix(p))
		}
		var got []string
		for _, r := range merge(in) {
			got = append(got, r.first.String(), r.last.String())
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("merge(%q) = %q, want %q", test.in, got, test.want)
		}
	}
}
