package nat

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// routeFile has the routes of IPv4, in the network of the process.
const routeFile = "/proc/self/net/route"

// maxRoutes is how many lines of the file are read at most.
const maxRoutes = 1 << 16

// DefaultRoute returns the way to the internet: by router, or if that is zero by the default
// route of IPv4 with the lowest metric.
func DefaultRoute(ctx context.Context, router netip.Addr) (Route, error) {
	r := Route{Router: router}
	if !router.IsValid() {
		f, err := os.Open(routeFile)
		if err != nil {
			return r, err
		}
		defer f.Close()
		if r.Router, r.Interface, err = parseRoutes(f); err != nil {
			return Route{}, err
		}
	}
	local, err := localTowards(ctx, r.Router)
	if err != nil {
		return Route{}, err
	}
	r.Local = local
	if r.Interface == "" {
		r.Interface = interfaceOf(local)
	}
	return r, nil
}

// parseRoutes finds the default route in the text of routeFile: its gateway and interface.
func parseRoutes(text io.Reader) (router netip.Addr, device string, err error) {
	const up, gateway = 1, 2 // flags, of linux/route.h
	best := uint64(1) << 32
	lines := bufio.NewScanner(text)
	for n := 0; lines.Scan() && n < maxRoutes; n++ {
		f := strings.Fields(lines.Text())
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		flags, err := strconv.ParseUint(f[3], 16, 32)
		if err != nil || flags&(up|gateway) != up|gateway {
			continue
		}
		metric, err := strconv.ParseUint(f[6], 10, 32)
		if err != nil || metric >= best {
			continue
		}
		raw, err := hex.DecodeString(f[2])
		if err != nil || len(raw) != 4 {
			continue
		}
		var ip [4]byte // the file has it in the order of the machine
		binary.NativeEndian.PutUint32(ip[:], binary.BigEndian.Uint32(raw))
		best, router, device = metric, netip.AddrFrom4(ip), f[0]
	}
	if err := lines.Err(); err != nil {
		return netip.Addr{}, "", fmt.Errorf("read %s: %w", routeFile, err)
	}
	if !router.IsValid() {
		return netip.Addr{}, "", errors.New("there is no default route of IPv4 with a router")
	}
	return router, device, nil
}

// interfaceOf returns the name of the interface that has an address, or "".
func interfaceOf(a netip.Addr) string {
	all, err := net.Interfaces()
	if err != nil {
		return ""
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, has := range addrs {
			if p, ok := has.(*net.IPNet); ok && p.IP.Equal(a.AsSlice()) {
				return i.Name
			}
		}
	}
	return ""
}
