// Made by tools/golden/local_sgd.py. Do not edit.
#pragma once

#include <vector>

namespace hasten::local_sgd_golden {

inline const std::vector<double> kSgdEvery1{
    0x1.a81031b3f92f2p-3,  -0x1.16835087d6c40p-2, -0x1.007f3b8c3c4bdp-1, -0x1.13d4ab5cbee80p-2,
    0x1.a700c07060434p-5,  0x1.90e5e02440e19p-1,  0x1.96c645146640cp-1,  0x1.3550c5ff57ca0p-4,
    -0x1.a5c6b6b544444p-2, -0x1.8f0b5ef7deac3p-2, -0x1.2ddb3dafb4259p-7, 0x1.84d9df1d3b542p-2,
    0x1.e40ab2979f2c2p-2,  0x1.33a75f1cbcc95p-4,  -0x1.90edc339e6eb5p-2, -0x1.fe28aeb79f75dp-2,
    0x1.549cea650d9e4p-5,  0x1.55f24feb3fd18p-1,  0x1.5c387f22bac3ep-1,  0x1.12bd22c5eed01p-4,
    -0x1.8468d9b513a2ep-4, -0x1.0061d4390a9b0p-1, -0x1.865b599e6a844p-2, -0x1.e358db85b2b85p-3,
    0x1.03a85b4020388p-1,  -0x1.9305181c74c6ep-3, -0x1.62640cc89038ap-1, 0x1.49fd535cd0568p-3,
    0x1.37fa19c9e7746p-2,  0x1.df6f9c91298e8p-2,  -0x1.2a93a578613e8p-2,
};

inline const std::vector<double> kSgdEvery3{
    0x1.9ce78f4f026a3p-3,  -0x1.1743fed2e5848p-2, -0x1.fc3a5c1e48e8ep-2, -0x1.0ded897c272a6p-2,
    0x1.234575d051f7ap-4,  0x1.902093c8ebd04p-1,  0x1.8bf86ed130a5fp-1,  0x1.bc29e67ad605ap-5,
    -0x1.8588543af50ddp-2, -0x1.7e2f69352a9cbp-2, -0x1.77563c1d5a9e4p-6, 0x1.64d5f58d56406p-2,
    0x1.ebd7d1eb7d6e6p-2,  0x1.69d263fbc8632p-4,  -0x1.8a18b19cb5db7p-2, -0x1.0228b155c3110p-1,
    0x1.926168b2fa48ap-4,  0x1.739d706b129c6p-1,  0x1.5f4574f9bcd56p-1,  0x1.fe1b28713bc1cp-7,
    -0x1.1a103cba8dcadp-6, -0x1.17c97a9c715acp-1, -0x1.c6b8cd1e6f048p-2, -0x1.aa5aaece1e356p-3,
    0x1.ce1e638a1cd33p-2,  -0x1.5b51b1f5f5136p-3, -0x1.4585bfa8d17a5p-1, 0x1.fc46b47d19e2ap-4,
    0x1.438c21ff06a96p-2,  0x1.dfec655331016p-2,  -0x1.4b0a35e29e4e0p-2,
};

inline const std::vector<double> kSgdEvery4Accumulated{
    0x1.cf5503e3ec932p-3,  -0x1.c2215d90dbcd6p-3, -0x1.dadf5c55f10c8p-2, -0x1.2015915e84affp-2,
    0x1.cb7350ea320e8p-4,  0x1.c4158693e724ap-1,  0x1.af17c45feaee8p-1,  0x1.b837ec1b978cap-6,
    -0x1.8a7178c7a7fd6p-2, -0x1.70763cdb01422p-2, -0x1.dbf2a5e705c26p-9, 0x1.6c719d6694068p-2,
    0x1.8180d04d60db2p-2,  -0x1.3a71dd7997055p-4, -0x1.d673679e18152p-2, -0x1.adc2966728fadp-2,
    -0x1.1e911b3b7ef55p-5, 0x1.2e1448e9cbdd4p-1,  0x1.5856b1589ce74p-1,  0x1.180f0a8d64cdcp-3,
    -0x1.71a4f31d5296ap-3, -0x1.1dfb10d50951ep-1, -0x1.8cde386d6ceeap-3, -0x1.68d3f907fffaep-2,
    0x1.3331743e30576p-1,  -0x1.8af01a6c6a98dp-3, -0x1.23087d28e6052p-1, 0x1.603996a44289dp-2,
    0x1.8143adb6c31c5p-4,  0x1.c72d993797534p-2,  -0x1.b321b22da63a8p-3,
};

inline const std::vector<double> kAdamWEvery3Uneven{
    0x1.3b273e8da1aa3p-2,  -0x1.7feca4f7760c2p-3, -0x1.cad58ef804e68p-2, -0x1.58733b40a3d7fp-2,
    0x1.2369ea05aeff2p-3,  0x1.fe6768b8f4ceap-2,  0x1.9705e91c09c34p-2,  -0x1.efae6c9ef84adp-5,
    -0x1.749e9c178957ap-2, -0x1.37c72bcf51cfbp-2, -0x1.7cb6428b38fa1p-8, 0x1.63e3489dacd72p-2,
    0x1.9893330ed87f8p-2,  0x1.6f41c3e227f0cp-7,  -0x1.b3d9bf3887dfdp-2, -0x1.c9d65612efdebp-2,
    -0x1.d96277f80f908p-4, 0x1.4f91f9ca95241p-2,  0x1.c10228aa1cdb2p-2,  0x1.5a4a2fde8de9bp-3,
    -0x1.6a777a284241cp-3, -0x1.20b3fac9e4dd3p-1, -0x1.061de02199af7p-1, 0x1.4da80461de181p-4,
    0x1.123f4f5d223b7p-1,  -0x1.740b9a6288e7ap-2, -0x1.3c96997714fe4p-1, -0x1.0d2ca7695d834p-3,
    0x1.4e83045d69b44p-2,  0x1.1e950cac1261dp-1,  -0x1.8fcc00fa953afp-2,
};

inline const std::vector<double> kAdamWEvery2Normed{
    0x1.20a9892c97643p-3,  -0x1.5918c86d0eaaep-2, -0x1.3ea631aa2ed34p-1, -0x1.94f83372f6e74p-3,
    0x1.14f2cf4ab1b24p-2,  0x1.256dcfeeb6f36p-1,  0x1.fb21a2980411ap-3,  -0x1.9cb29f773d8a0p-3,
    -0x1.495066fe62e58p-2, -0x1.19f238ef1ee6ep-1, -0x1.0b72db2a8fc00p-3, 0x1.26ca9412b0e62p-2,
    0x1.06a412a6588bep-1,  0x1.fe9da1a44a9eep-4,  -0x1.4bf50eed65209p-2, -0x1.154b9a5f1da08p-1,
    -0x1.e2368ad9c9aafp-4, 0x1.674d376560562p-2,  0x1.3d61b334a76bcp-1,  0x1.798e617814024p-3,
    -0x1.29637db759ef4p-4, -0x1.d191087f19a5fp-2, -0x1.acbf0614af688p-2, 0x1.2176869036658p-9,
    0x1.af309d229e680p-2,  -0x1.019c4074175efp-2, -0x1.d26dce0117ce6p-2, -0x1.c7d71cef7c888p-7,
    0x1.7a998462b3e0ep-3,  0x1.1b1d560171a02p-1,  -0x1.177f4d54ffdc0p-1, -0x1.d57444c21204cp-3,
    0x1.acb9bef3c0ab0p-3,  0x1.0f0e5afa9da78p-1,  0x1.558ffe1933a74p-2,  -0x1.eddd9392defd2p-3,
    0x1.42f1f7e9040a3p-4,  0x1.6276d8353dcc0p-2,  0x1.226510bba6d2bp-2,  0x1.d245bc9b441c8p-4,
    -0x1.235c568e7749ap-4, -0x1.9e010df2ae544p-5, -0x1.2aebb7893b53dp-2, -0x1.1a6f03f8f4e38p-2,
    0x1.70a7f6d398c10p-9,  0x1.1aa93de12dba4p-2,  0x1.5e68dfe8ef930p-1,  0x1.46df62fe02a7dp-1,
    0x1.83c7921814c9bp-1,  0x1.dbc85cc527f8ap-1,  0x1.4d733c82d1daap-1,
};

} // namespace hasten::local_sgd_golden
