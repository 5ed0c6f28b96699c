// Package upnp asks a router for port mappings by UPnP-IGD, as a Client of package nat.
//
//	m := &nat.Manager{FindUPnP: new(upnp.Finder).Find}
//
// UPnP has any device of the network say at which URL it is to be asked. A Client believes the
// router alone: it takes answers to its search from the router's address, and connects to no other
// address, whatever LOCATION, URLBase, a control URL or a redirection says. Bodies and times are
// bounded.
package upnp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/huin/goupnp"
	"github.com/huin/goupnp/soap"

	"culvert.dev/nat"
)

const (
	searchPort     = 1900
	searchAddress  = "239.255.255.250"
	searchInterval = 400 * time.Millisecond // between two searches, as datagrams get lost
	maxDatagram    = 4 << 10                // bytes of an answer to a search
	maxBody        = 256 << 10              // bytes of a description, or of an answer to an action
	requestTimeout = 5 * time.Second        // of one request of HTTP
	maxLocations   = 8                      // URLs that are tried
	description    = "culvert"
	checkInterval  = time.Minute // a router may lose mappings without a word
)

// targets are the services that map ports, the newest first: UPnP Forum, WANIPConnection:2 and
// WANPPPConnection:1.
var targets = []string{
	"urn:schemas-upnp-org:service:WANIPConnection:2",
	"urn:schemas-upnp-org:service:WANIPConnection:1",
	"urn:schemas-upnp-org:service:WANPPPConnection:1",
}

// A Finder finds routers.
type Finder struct {
	// Control is called with each socket, as that of a net.Dialer; nil is not called.
	Control func(network, address string, c syscall.RawConn) error
}

// A Client asks one router. It is a nat.Client.
type Client struct {
	route   nat.Route
	service string // of targets
	soap    *soap.SOAPClient
}

// Find looks for the router of route in its network. It returns an error if that does not answer
// before ctx ends.
func (f *Finder) Find(ctx context.Context, route nat.Route) (nat.Client, error) {
	return f.find(ctx, route, net.JoinHostPort(searchAddress, strconv.Itoa(searchPort)))
}

// find is Find with a search at some address, and at the router's own.
func (f *Finder) find(ctx context.Context, route nat.Route, multicast string) (nat.Client, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lc := net.ListenConfig{Control: f.Control}
	conn, err := lc.ListenPacket(ctx, "udp4", net.JoinHostPort(route.Local.String(), "0"))
	if err != nil {
		return nil, fmt.Errorf("upnp: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	to := []net.Addr{net.UDPAddrFromAddrPort(netip.AddrPortFrom(route.Router, searchPort))}
	if group, err := netip.ParseAddrPort(multicast); err == nil {
		to = append(to, net.UDPAddrFromAddrPort(group))
	}
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		search(ctx, conn, to)
	}()
	tried := map[string]bool{}
	why := errors.New("upnp: no answer to the search")
	b := make([]byte, maxDatagram)
	for {
		n, from, err := conn.ReadFrom(b)
		if err != nil {
			return nil, why
		}
		location, err := readAnswer(b[:n])
		if at, ok := from.(*net.UDPAddr); !ok || at.AddrPort().Addr().Unmap() != route.Router || err != nil || tried[location] || len(tried) >= maxLocations {
			continue
		}
		tried[location] = true
		c, err := f.describe(ctx, route, location)
		if err == nil {
			return c, nil
		}
		why = err
	}
}

// search asks for all targets, again and again until ctx is done.
func search(ctx context.Context, conn net.PacketConn, to []net.Addr) {
	tick := time.NewTicker(searchInterval)
	defer tick.Stop()
	for {
		for _, target := range targets {
			for _, at := range to {
				_, _ = conn.WriteTo(fmt.Appendf(nil, "M-SEARCH * HTTP/1.1\r\nHOST: %s:%d\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\nST: %s\r\n\r\n", searchAddress, searchPort, target), at)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// readAnswer returns the LOCATION of an answer to a search for one of targets.
func readAnswer(b []byte) (string, error) {
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	location := resp.Header.Get("Location")
	if resp.StatusCode != http.StatusOK || location == "" {
		return "", fmt.Errorf("upnp: answer to the search has status %d and location %q", resp.StatusCode, location)
	}
	return location, nil
}

// httpClient returns a client that connects to the router alone, and reads bounded bodies.
func (f *Finder) httpClient(route nat.Route) *http.Client {
	d := &net.Dialer{Timeout: requestTimeout, Control: f.Control}
	if route.Local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(route.Local, 0))
	}
	return &http.Client{
		Timeout: requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return errors.New("upnp: the router redirects, which is not followed")
		},
		Transport: bounded{&http.Transport{
			DisableKeepAlives: true,
			Proxy:             nil, // whatever the environment says: this is about the next router
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				at, err := netip.ParseAddrPort(address)
				if err != nil || at.Addr().Unmap() != route.Router {
					return nil, fmt.Errorf("upnp: %q is not the router %s", address, route.Router)
				}
				return d.DialContext(ctx, network, address)
			},
		}},
	}
}

// bounded cuts bodies at maxBody.
type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(req)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, maxBody), resp.Body}
	}
	return resp, err
}

// checkURL returns an error where u is not one of the router.
func checkURL(u *url.URL, route nat.Route) error {
	at, err := netip.ParseAddr(u.Hostname())
	if u.Scheme != "http" || err != nil || at.Unmap() != route.Router || u.User != nil {
		return fmt.Errorf("upnp: %q is not a URL of the router %s", u.Redacted(), route.Router)
	}
	return nil
}

// describe reads the description of the router at location and makes a Client of it.
func (f *Finder) describe(ctx context.Context, route nat.Route, location string) (*Client, error) {
	at, err := url.Parse(location)
	if err != nil {
		return nil, fmt.Errorf("upnp: location %q: %w", location, err)
	}
	if err := checkURL(at, route); err != nil {
		return nil, err
	}
	client := f.httpClient(route)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("upnp: %s has status %d", at, resp.StatusCode)
	}
	root, err := parseDescription(resp.Body, at)
	if err != nil {
		return nil, fmt.Errorf("upnp: description at %s: %w", at, err)
	}
	for _, target := range targets {
		for _, s := range root.Device.FindService(target) {
			if !s.ControlURL.Ok {
				continue
			}
			if err := checkURL(&s.ControlURL.URL, route); err != nil {
				return nil, err
			}
			return &Client{route: route, service: target, soap: &soap.SOAPClient{EndpointURL: s.ControlURL.URL, HTTPClient: *client}}, nil
		}
	}
	return nil, fmt.Errorf("upnp: %s has no service that maps ports", at)
}

// parseDescription parses the description of a device that was read at a URL.
func parseDescription(r io.Reader, at *url.URL) (*goupnp.RootDevice, error) {
	root := new(goupnp.RootDevice)
	d := xml.NewDecoder(io.LimitReader(r, maxBody))
	d.DefaultSpace = goupnp.DeviceXMLNamespace
	if err := d.Decode(root); err != nil {
		return nil, err
	}
	base := at
	if root.URLBaseStr != "" {
		var err error
		if base, err = url.Parse(root.URLBaseStr); err != nil {
			return nil, err
		}
	}
	root.SetURLBase(base)
	return root, nil
}

// Protocol returns "upnp".
func (c *Client) Protocol() string { return "upnp" }

// Poll asks for the router's outside address.
func (c *Client) Poll(ctx context.Context) (outside netip.Addr, lost bool, err error) {
	var out struct{ NewExternalIPAddress string }
	if err := c.do(ctx, "GetExternalIPAddress", nil, &out); err != nil {
		return netip.Addr{}, false, err
	}
	outside, err = netip.ParseAddr(strings.TrimSpace(out.NewExternalIPAddress))
	if err != nil || outside.IsUnspecified() {
		return netip.Addr{}, false, &nat.Refusal{Protocol: "upnp", Text: "it has no outside address at the moment"}
	}
	return outside, false, nil
}

// A key identifies a mapping: UPnP Forum, WANIPConnection:1 section 2.4.
type key struct {
	NewRemoteHost   string
	NewExternalPort string
	NewProtocol     string
}

// Error codes of WANIPConnection:2 section 2.5.
const (
	errNoSuchEntry    = 714
	errNoWildcard     = 715
	errConflict       = 718
	errSamePorts      = 724
	errPermanentOnly  = 725
	errNoPorts        = 728
	errConflictOther  = 729
	errNotAuthorized  = 606
	errActionFailed   = 501
	errInvalidAction  = 401
	errConflictAction = 402
)

// texts are the error codes in plain words.
var texts = map[int]string{
	errInvalidAction:  "it does not know the request",
	errConflictAction: "it could not read the request",
	errActionFailed:   "it could not do it",
	errNotAuthorized:  "port mapping is switched off, or not allowed for this host",
	errNoSuchEntry:    "there is no such mapping",
	errNoWildcard:     "it maps no ports for everybody outside",
	errConflict:       "the outside port is taken by another host",
	errSamePorts:      "inside and outside port must be the same",
	errPermanentOnly:  "it makes permanent mappings only",
	errNoPorts:        "it has no free port",
	errConflictOther:  "the outside port is taken by another mechanism",
}

// Map adds, renews or deletes a mapping. It does not take a port away from another host, which
// some routers would let it.
func (c *Client) Map(ctx context.Context, r nat.Request) (nat.Grant, error) {
	k := key{NewExternalPort: strconv.Itoa(int(r.External.Port())), NewProtocol: strings.ToUpper(r.Network)}
	var has struct {
		NewInternalPort           string
		NewInternalClient         string
		NewEnabled                string
		NewPortMappingDescription string
		NewLeaseDuration          string
	}
	err := c.do(ctx, "GetSpecificPortMappingEntry", &k, &has)
	ours := err == nil && has.NewInternalClient == c.route.Local.String() && has.NewInternalPort == strconv.Itoa(int(r.Internal))
	switch refusal, ok := errors.AsType[*nat.Refusal](err); {
	case err != nil && !ok:
		return nat.Grant{}, err
	case err != nil && refusal.Code != errNoSuchEntry && refusal.Code != errActionFailed && refusal.Code != errConflictAction:
		return nat.Grant{}, err
	case r.Lifetime == 0:
		if !ours {
			return nat.Grant{}, nil // it is gone, or somebody else's
		}
		return nat.Grant{}, c.do(ctx, "DeletePortMapping", &k, nil)
	case err == nil && !ours:
		return nat.Grant{}, c.refusal(errConflict)
	}
	grant := nat.Grant{External: netip.AddrPortFrom(netip.Addr{}, r.External.Port()), Lifetime: r.Lifetime, Check: checkInterval}
	if ours {
		left, err := strconv.ParseUint(has.NewLeaseDuration, 10, 32)
		if err == nil && (left == 0 || time.Duration(left)*time.Second > r.Lifetime/2) {
			grant.Lifetime = time.Duration(left) * time.Second
			return grant, nil
		}
	}
	add := func(lease time.Duration) error {
		return c.do(ctx, "AddPortMapping", &struct {
			NewRemoteHost             string
			NewExternalPort           string
			NewProtocol               string
			NewInternalPort           string
			NewInternalClient         string
			NewEnabled                string
			NewPortMappingDescription string
			NewLeaseDuration          string
		}{"", k.NewExternalPort, k.NewProtocol, strconv.Itoa(int(r.Internal)), c.route.Local.String(), "1", description, strconv.Itoa(int(lease / time.Second))}, nil)
	}
	err = add(r.Lifetime)
	if refusal, ok := errors.AsType[*nat.Refusal](err); ok && refusal.Code == errPermanentOnly {
		grant.Lifetime = 0
		err = add(0)
	}
	return grant, err
}

// do performs an action. An error that the router gave is a *nat.Refusal.
func (c *Client) do(ctx context.Context, action string, in, out any) error {
	if in == nil {
		in = &struct{}{}
	}
	if out == nil {
		out = &struct{}{}
	}
	err := c.soap.PerformActionCtx(ctx, c.service, action, in, out)
	if fault, ok := errors.AsType[*soap.SOAPFaultError](err); ok {
		return c.refusal(fault.Detail.UPnPError.Errorcode)
	}
	if err != nil {
		return fmt.Errorf("upnp: %s: %w", action, err)
	}
	return nil
}

// refusal makes an error of a code of the router.
func (c *Client) refusal(code int) *nat.Refusal {
	text, ok := texts[code]
	if !ok {
		text = "it does not say why"
	}
	return &nat.Refusal{Protocol: "upnp", Code: code, Text: text, Taken: code == errConflict || code == errConflictOther}
}
