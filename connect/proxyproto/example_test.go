package proxyproto_test

import (
	"fmt"
	"net/netip"

	"culvert.dev/connect/proxyproto"
)

// A header tells an endpoint which client a stream comes from.
func ExampleParse() {
	sent, err := (&proxyproto.Header{
		Version:     1,
		Source:      netip.MustParseAddrPort("192.0.2.7:50000"),
		Destination: netip.MustParseAddrPort("10.0.1.7:5432"),
	}).Append(nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%q\n", sent)

	h, n, err := proxyproto.Parse(append(sent, "first bytes of the client"...))
	fmt.Println(h.Source, n == len(sent), err)
	// Output:
	// "PROXY TCP4 192.0.2.7 10.0.1.7 50000 5432\r\n"
	// 192.0.2.7:50000 true <nil>
}
