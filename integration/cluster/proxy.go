package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// proxy is the kube-proxy of a cluster, for IPv4: rules of nftables in the
// sandbox lead from the addresses of Services to ready endpoints, at random.
type proxy struct {
	c        *Cluster
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
	changed  chan struct{}
	routed   map[string]bool // addresses that the sandbox has a route to
}

// startProxy keeps the rules until ctx ends; the sandbox's end removes them.
func (c *Cluster) startProxy(ctx context.Context) error {
	p := &proxy{c: c, changed: make(chan struct{}, 1), routed: map[string]bool{}}
	// From the sandbox, a route is wanted before the rules are asked. Who comes
	// from a pod goes back to the bridge it came by.
	if err := ip(fmt.Sprintf("route add %s dev %s", c.ServiceCIDR, c.bridge)); err != nil {
		return err
	}
	if err := forward(c.bridge, true); err != nil {
		return err
	}
	if err := p.apart(true); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(c.Client, 0)
	p.services = factory.Core().V1().Services().Lister()
	p.slices = factory.Discovery().V1().EndpointSlices().Lister()
	wake := func() {
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: func(any) { wake() }, UpdateFunc: func(_, _ any) { wake() }, DeleteFunc: func(any) { wake() }}
	for _, inf := range []cache.SharedIndexInformer{factory.Core().V1().Services().Informer(), factory.Discovery().V1().EndpointSlices().Informer()} {
		if _, err := inf.AddEventHandler(handler); err != nil {
			return err
		}
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := p.write(); err != nil {
		return err
	}
	c.agents.Go(func() {
		defer factory.Shutdown()
		for {
			select {
			case <-ctx.Done():
				_ = nft(fmt.Sprintf("delete table ip %s\ndelete table ip %s_apart\n", c.bridge, c.bridge))
				return
			case <-p.changed:
			}
			// Changes come in crowds.
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			if err := p.write(); err != nil {
				fmt.Fprintf(os.Stderr, "cluster %s: %v\n", c.Name, err)
			}
		}
	})
	return nil
}

// apart keeps the cluster's pods from those of other clusters, or lets them.
func (p *proxy) apart(yes bool) error {
	rule := ""
	if yes {
		rule = fmt.Sprintf("iifname %[1]q oifname != %[1]q drop", p.c.bridge)
	}
	return nft(fmt.Sprintf(`table ip %[1]s_apart
delete table ip %[1]s_apart
table ip %[1]s_apart {
	chain forward { type filter hook forward priority 0; %[2]s
	}
}
`, p.c.bridge, rule))
}

// write replaces all rules at once. Connections that are there stay with the
// endpoint they have.
func (p *proxy) write() error {
	services, err := p.services.List(labels.Everything())
	if err != nil {
		return err
	}
	var rules strings.Builder
	for _, s := range services {
		for _, port := range s.Spec.Ports {
			to := p.endpoints(s, port)
			for _, at := range p.addresses(s, port) {
				if err := p.route(at); err != nil {
					return err
				}
				rule(&rules, at, strings.ToLower(string(port.Protocol)), to)
			}
		}
	}
	return nft(fmt.Sprintf(`table ip %[1]s
delete table ip %[1]s
table ip %[1]s {
	chain services {
%[2]s	}
	chain prerouting { type nat hook prerouting priority -100; iifname %[1]q jump services
	}
	chain output { type nat hook output priority -100; jump services
	}
	chain postrouting { type nat hook postrouting priority 100; ip saddr %[3]s ct status dnat masquerade
	}
	chain refuse { ip daddr %[4]s reject with icmp port-unreachable
	}
	chain forward { type filter hook forward priority 0; jump refuse
	}
	chain sent { type filter hook output priority 0; jump refuse
	}
}
`, p.c.bridge, rules.String(), p.c.PodCIDR, p.c.ServiceCIDR))
}

// route lets the sandbox send to an address that is nobody's: the rules are
// asked after a route was found.
func (p *proxy) route(at string) error {
	host := at[:strings.LastIndexByte(at, ':')]
	if a, err := netip.ParseAddr(host); err != nil || p.c.ServiceCIDR.Contains(a) || p.routed[host] {
		return err
	}
	p.routed[host] = true
	return ip(fmt.Sprintf("route replace %s/32 dev %s", host, p.c.bridge))
}

// rule leads an address and port to one of several. Without any the packet
// goes on to where it is refused.
func rule(b *strings.Builder, at, protocol string, to []string) {
	switch len(to) {
	case 0:
	case 1:
		fmt.Fprintf(b, "\t\t%s dnat to %s\n", match(at, protocol), to[0])
	default:
		// A verdict for each: a map of addresses with ports is not of every nft.
		for i, t := range to {
			if left := len(to) - i; left > 1 {
				fmt.Fprintf(b, "\t\t%s numgen random mod %d == 0 dnat to %s\n", match(at, protocol), left, t)
			} else {
				fmt.Fprintf(b, "\t\t%s dnat to %s\n", match(at, protocol), t)
			}
		}
	}
}

func match(at, protocol string) string {
	i := strings.LastIndexByte(at, ':')
	return fmt.Sprintf("ip daddr %s %s dport %s", at[:i], protocol, at[i+1:])
}

// addresses are those of a Service's port: its ClusterIP, externalIPs, those of
// its load balancer, and its NodePort on each node.
func (p *proxy) addresses(s *corev1.Service, port corev1.ServicePort) []string {
	var hosts, at []string
	if s.Spec.ClusterIP != corev1.ClusterIPNone {
		hosts = append(hosts, s.Spec.ClusterIP)
	}
	hosts = append(hosts, s.Spec.ExternalIPs...)
	for _, in := range s.Status.LoadBalancer.Ingress {
		hosts = append(hosts, in.IP)
	}
	for _, h := range hosts {
		if h != "" && !strings.Contains(h, ":") {
			at = append(at, fmt.Sprintf("%s:%d", h, port.Port))
		}
	}
	if port.NodePort != 0 {
		for _, n := range p.c.kubelet.nodes {
			for _, h := range p.c.kubelet.nodeIPs(n.Name) {
				if !strings.Contains(h, ":") {
					at = append(at, fmt.Sprintf("%s:%d", h, port.NodePort))
				}
			}
		}
	}
	return at
}

// endpoints are the ready ones, or the ones that terminate and still serve.
func (p *proxy) endpoints(s *corev1.Service, port corev1.ServicePort) []string {
	list, err := p.slices.EndpointSlices(s.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: s.Name}))
	if err != nil {
		return nil
	}
	var ready, serving []string
	for _, slice := range list {
		if slice.AddressType != discoveryv1.AddressTypeIPv4 {
			continue
		}
		for _, sp := range slice.Ports {
			if value(sp.Name, "") != port.Name || sp.Port == nil {
				continue
			}
			for _, e := range slice.Endpoints {
				to := fmt.Sprintf("%s:%d", e.Addresses[0], *sp.Port)
				switch {
				case value(e.Conditions.Ready, true):
					ready = append(ready, to)
				case value(e.Conditions.Serving, false):
					serving = append(serving, to)
				}
			}
		}
	}
	if len(ready) == 0 {
		ready = serving
	}
	slices.Sort(ready)
	return ready
}

// nft runs commands of nft(8), all or none.
func nft(commands string) error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(commands)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s in\n%s", err, out, commands)
	}
	return nil
}
