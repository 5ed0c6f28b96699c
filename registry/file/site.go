package file

// A Site is what this site is to others: it takes those as peers that join by a token.
type Site struct {
	Gateways []SiteGateway `yaml:"gateways" what:"a gateway" empty:"leave the key out where other sites cannot connect"` // as other sites reach them
	Key      string        `yaml:"key,required"`                                                                         // of identity.keys, with a SPIFFE id
	Trust    string        `yaml:"trust,required"`                                                                       // of identity.trust: the own trust domain
	State    string        `yaml:"state,required"`                                                                       // a folder; an absolute path once it is read
}

// A SiteGateway is a gateway of this site.
type SiteGateway struct {
	Address    string   `yaml:"address,required,short" as:"hostPort"`
	Transports []string `yaml:"transports" what:"a protocol" oneof:"connect connect-h2 connect-h3 websocket hbone" unique:"protocol" empty:"leave the key out for connect-h2"`
}

// TrustPeers is the name by which listeners trust all peers that have joined.
const TrustPeers = "peers"

// checkSite finds what is wrong with site.
func (d *decoder) checkSite() {
	s := d.cfg.Site
	if s == nil {
		return
	}
	at := d.root.object("site")
	if d.cfg.Cluster == "" {
		d.errorf(at.node, "add cluster: NAME to the configuration", "site needs cluster, by which other sites call it")
	}
	c := d.cfg.Identity
	if c == nil {
		c = &Identity{}
	}
	if c.Keys[s.Key] == nil && s.Key != "" {
		d.errorf(at.where("key"), "add it to identity.keys", "there is no key %q", clip(s.Key))
	}
	switch t := c.Trust[s.Trust]; {
	case t == nil && s.Trust != "":
		d.errorf(at.where("trust"), "add it to identity.trust", "there is no trust %q", clip(s.Trust))
	case t != nil && t.Type == TypeCA:
		d.errorf(at.where("trust"), "name one without type: ca", "trust %q has CAs of no trust domain, and other sites verify gateways by that of one", clip(s.Trust))
	}
	if c.Trust[TrustPeers] != nil {
		d.errorf(at.node, "call it otherwise", "identity.trust has %q, which is the name of the trust in all peers that have joined", TrustPeers)
	}
}
