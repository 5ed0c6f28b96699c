package sni

import (
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// ParseIstio reads the server name of an Istio sidecar that reaches for
// another network, "outbound_.<port>_.<subset>_.<service>": four fields with
// "_." between them, the subset often empty.
//
//	outbound_.443_._.reviews.default.svc.cluster.local
//
// It is false for every other name, which then means itself.
func ParseIstio(name tunnel.Name) (service tunnel.Name, port uint16, subset string, ok bool) {
	f := strings.Split(name.String(), "_.")
	if len(f) != 4 || f[0] != "outbound" {
		return tunnel.Name{}, 0, "", false
	}
	n, err := strconv.ParseUint(f[1], 10, 16)
	if err != nil || n == 0 || f[1][0] == '0' { // a name has one spelling
		return tunnel.Name{}, 0, "", false
	}
	if service, err = tunnel.ParseName(f[3]); err != nil {
		return tunnel.Name{}, 0, "", false
	}
	return service, uint16(n), f[2], true
}
