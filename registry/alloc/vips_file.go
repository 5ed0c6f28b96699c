package alloc

import (
	"fmt"
	"net/netip"
)

// VIPFile returns the File that addresses are kept in:
//
//	{"version": 1, "vips": [
//	  {"service": "db.example.com", "address": "240.17.3.9", "since": "2026-01-02T15:04:05Z"}
//	]}
//
// with "gone" besides where the service is gone.
func VIPFile(path string) File[VIP] {
	return File[VIP]{Path: path, what: "assigned VIPs", list: "vips", parse: parseVIPs, entry: func(a VIP) any {
		return &vipEntry{a.Service, a.Address, timesOf(a.Since, a.Gone)}
	}}
}

type vipEntry struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	times
}

// parseVIPs reads the content of a file and takes nothing for granted: two services
// of one address, two addresses of one family, and what this version does not
// know, are errors.
func parseVIPs(data []byte) ([]VIP, error) {
	var f struct {
		Version int        `json:"version"`
		VIPs    []vipEntry `json:"vips"`
	}
	if err := parseFile(data, &f); err != nil {
		return nil, err
	}
	type has struct{ service, family string }
	services, addresses := make(map[has]bool, len(f.VIPs)), make(map[netip.Addr]string, len(f.VIPs))
	all := make([]VIP, 0, len(f.VIPs))
	for i, e := range f.VIPs {
		other, twice := addresses[e.Address]
		key := has{e.Service, Family(e.Address)}
		switch {
		case e.Service == "":
			return nil, fmt.Errorf("entry %d names no service", i+1)
		case !e.Address.IsValid():
			return nil, fmt.Errorf("entry %d, %s, has no address", i+1, e.Service)
		case e.Address.Is4In6() || e.Address.Zone() != "":
			return nil, fmt.Errorf("entry %d, %s, has the address %q: write it without a zone, and IPv4 as IPv4", i+1, e.Service, e.Address)
		case services[key]:
			return nil, fmt.Errorf("entry %d, %s, has an %s address already", i+1, e.Service, key.family)
		case twice:
			return nil, fmt.Errorf("entry %d, %s, has %s, which is assigned to %s", i+1, e.Service, e.Address, other)
		}
		services[key], addresses[e.Address] = true, e.Service
		all = append(all, VIP{Service: e.Service, Address: e.Address, Since: e.Since, Gone: e.gone()})
	}
	return all, nil
}
